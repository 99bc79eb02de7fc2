"""Policy gradients on a page: generate, score, update (RLOO: each sample against the others of its prompt).

torchrun --nproc-per-node 2 examples/rollout/policy_gradient.py [STEPS] [key=value ...]

A small model learns the next number of Collatz paths, "7:" -> "22\\n", from nothing but rewards of its own samples.
evenload generates and trains evenly under any layout and plugin; the algorithm is the lines below, and yours to change.
"""

import sys

import evenload
import numpy as np
from evenload.runtime.attention.labels import Labels, weighed
from evenload.runtime.generate.request import Generation, Request
from evenload.training.job import open_host, open_world

LETTERS = "0123456789:\n"
RECIPE = ["model.hidden_size=64", "model.vocab_size=12", "data.max_length=16", "train.global_batch_size=512"]
NUMBERS, SAMPLES, LR = range(2, 34), 16, 1e-3


def tokens_of(text):
    """The place of each letter among `LETTERS`."""
    return tuple(map(LETTERS.index, text))


def reward(number, tokens):
    """The share of letters that are right, each at its place."""
    wanted = tokens_of(f"{number // 2 if number % 2 == 0 else 3 * number + 1}\n")
    return sum(map(int.__eq__, tokens, wanted)) / max(len(tokens), len(wanted))


def step(host, recipe, number, mark):
    """The mean reward of new samples, after an update by their advantages."""
    requests = [Request(n, tokens_of(f"{n}:"), limit=4, samples=tuple(range(SAMPLES))) for n in NUMBERS]
    settings = Generation(seed=number, end_tokens=frozenset(tokens_of("\n")))
    samples = host.generate(requests, settings, mark=mark)  # all of them on every rank, so all that follows is alike
    rewards = np.array([reward(one.prompt, one.tokens) for one in samples]).reshape(len(NUMBERS), SAMPLES)
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) * SAMPLES / (SAMPLES - 1)).ravel()
    if not advantages.any():
        return rewards.mean()
    prompts = [tokens_of(f"{one.prompt}:") for one in samples]
    rows = [np.array(prompt + one.tokens) for prompt, one in zip(prompts, samples, strict=True)]
    lengths = np.array([len(row) for row in rows])
    completions = [np.where(np.arange(len(r)) < len(p), -100, r) for p, r in zip(prompts, rows, strict=True)]
    labels = Labels(completions.__getitem__, np.array([len(one.tokens) for one in samples]))
    weights = [np.full(length, advantage) for length, advantage in zip(lengths, advantages, strict=True)]
    # The loss is the sum of advantage x -log p over the number of samples; advantages alone add up to 0.
    labels = weighed(labels, rows.__getitem__, lengths, weights.__getitem__, divisor=float(len(samples)))
    host.train_step(evenload.plan(recipe, lengths), rows.__getitem__, lr=LR, labels=labels, mark=mark)
    return rewards.mean()


steps = int(sys.argv[1]) if sys.argv[1:] else 200
recipe = evenload.load_recipe("quickstart", [*RECIPE, *sys.argv[2:]])
with open_world(recipe) as (world, watchdog):
    host = open_host(recipe, world)
    for number in range(steps):
        mean = step(host, recipe, number, watchdog.at)  # which ends the run where a rank hangs
        if world.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number:4}  mean reward {mean:.3f}", flush=True)
    host.close()
