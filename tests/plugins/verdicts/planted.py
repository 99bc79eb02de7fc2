"""Judges with planted biases, and texts whose worth, length and lists are drawn, for comparisons whose truth is known.

A judge is a function of the texts alone: the first word of a text is what it is worth, its length and lists are its
style. It prefers the first with the probability sigmoid(worth + position + length + lists), by what the texts differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from evenload.plugins.verdicts.pairs import Pairs


class Bias(NamedTuple):
    """What a judge likes besides a text's worth."""

    position: float = 0.8
    length: float = 3.0
    lists: float = 0.8
    ties: float = 0.1
    """Answers that are a tie whatever the texts are."""


class World(NamedTuple):
    """What A is like next to B."""

    worth: float = 0.0
    """Mean of what a text of A is worth more."""
    spread: float = 1.0
    """Of that over prompts."""
    longer: float = 1.3
    lists: int = 3


def sigmoid(z):
    return 1 / (1 + np.exp(-np.asarray(z)))


def true_rate(world, bias):
    """The rate at which A is preferred at equal style, over both orders and all prompts."""
    worth = np.random.default_rng(0).normal(world.worth, world.spread, 200_000)
    preferred = (sigmoid(worth + bias.position) + sigmoid(worth - bias.position)).mean() / 2
    return bias.ties / 2 + (1 - bias.ties) * preferred


def pairs_of(world, seed, prompts=120, samples=1):
    rng, of, texts = np.random.default_rng([seed, 0]), np.repeat(np.arange(prompts), samples), []
    worth = rng.normal(world.worth, world.spread, prompts)
    for place in of:
        base = rng.lognormal(3.3, 0.4)
        lengths = [max(1, int(base * factor * rng.lognormal(0, 0.35))) for factor in (world.longer, 1)]
        items = rng.integers(0, world.lists + 1), rng.integers(0, 2)
        words = [f"{value:.9f}" + " w" * n for value, n in zip((worth[place], 0), lengths, strict=True)]
        texts.append(tuple(text + "\n- x" * n for text, n in zip(words, items, strict=True)))
    return Pairs(list(range(prompts)), [str(n) for n in range(prompts)], of, texts)


def judge_of(bias, seed):
    rng = np.random.default_rng([seed, 1])

    def style(text):
        items = text.count("- x")
        return float(text.split()[0]), 1 + text.count("w") + 2 * items, items

    def judge(questions):
        z = []
        for _, first, second in questions:
            (worth_a, words_a, items_a), (worth_b, words_b, items_b) = style(first), style(second)
            length = bias.length * (words_a - words_b) / (words_a + words_b)
            lists = bias.lists * (items_a - items_b) / max(1, items_a + items_b)
            z.append(worth_a - worth_b + bias.position + length + lists)
        verdicts = (rng.random(len(z)) < sigmoid(z)).astype(float)
        return np.where(rng.random(len(z)) < bias.ties, 0.5, verdicts).tolist()

    return judge


def shipped_judge(seed, prompts=500, longer=0.706):
    """Pairs of equal worth, A longer in a share of them, and a judge like the verdicts that FastChat ships: the longer
    text wins 68 %, the first 53 %, and 13 % of the verdicts flip when the order is swapped (lm-sys/FastChat 3911)."""
    rng = np.random.default_rng(seed)
    base, ratio = rng.lognormal(4.5, 0.4, prompts), np.exp(np.abs(rng.normal(0, 0.5, prompts)) + 0.02)
    short, long = np.maximum(1, base.astype(int)), np.maximum(2, (base * ratio).astype(int))
    a_is_longer = rng.random(prompts) < longer
    words = [(x, y) if first else (y, x) for x, y, first in zip(long, short, a_is_longer, strict=True)]
    texts = [("a" + " w" * a, "b" + " w" * b) for a, b in words]
    noise, place = rng.logistic(size=prompts), np.where(rng.random(prompts) < 0.7, 0.297, -0.297)

    def judge(questions):
        own = np.array([question.prompt for question in questions])
        signs = np.array([1 if question.first[0] == "a" else -1 for question in questions])
        lengths = np.array([np.sign(len(question.first) - len(question.second)) for question in questions])
        return (0.754 * lengths + signs * noise[own] + place[own] > 0).astype(float).tolist()

    return Pairs(list(range(prompts)), [str(n) for n in range(prompts)], np.arange(prompts), texts), judge
