"""Policies in a toy of a run, whose losses fall by what is drawn: DataFlex's faults are not ours.

A step draws sequences by the shares of the last answer, cuts them over ranks and micro-batches in any way, and every
rank tells the losses of its own sequences; the policy is asked once, of all.
"""

import builtins
import json
import math
from typing import NamedTuple

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.policies import DomainsToMix, Proportions, SeenDomains, chosen_policy, seen_domains, started, stepped
from evenload.core.registry import data_policies

load_plugins()
DOMAINS = DomainsToMix(("chat", "code", "prose"), (0.2, 0.5, 0.3), (100, 5000, 900))
LAWS = ((1.0, 30.0, 0.4), (0.5, 8.0, 0.2), (2.0, 3.0, 0.1))
SETTINGS = {
    "temperature": {"tau": 1.5},
    "odm": {"warmup_steps": 2},
    "doremi": {},
    "ado": {"skip_steps": 2, "warmup_steps": 6, "every": 3},
}


class Sequences(NamedTuple):
    """What a step draws, and what each costs."""

    domain: np.ndarray
    losses: np.ndarray
    targets: np.ndarray
    excess: np.ndarray


def draw(step, shares, tokens):
    rng = np.random.default_rng([11, step])
    domain = rng.choice(3, 16, p=shares)
    targets = rng.integers(20, 400, 16)
    means = np.array([LAWS[i][0] + LAWS[i][1] * (1000 + tokens[i]) ** -LAWS[i][2] for i in domain])
    return Sequences(domain, means * targets * rng.uniform(0.9, 1.1, 16), targets, targets * rng.uniform(0, 0.3, 16))


def gathered(sequences, step, ranks):
    """What all ranks tell: each has its sequences in an order of its own, in micro-batches of its own."""
    rng = np.random.default_rng([step, ranks])
    owner = rng.integers(0, ranks, len(sequences.domain))
    order = np.concatenate([rng.permutation(np.flatnonzero(owner == rank)) for rank in range(ranks)])
    return seen_domains(3, *(column[order] for column in sequences))


def run(name, ranks, kill_at=None):
    """Answers of a run whose step t has ``ranks[t]`` ranks."""
    policy = chosen_policy("mix", name, SETTINGS[name], data_policies("mix"))
    state, answer = started(policy, DOMAINS)
    tokens, out = np.zeros(3), [answer]
    for step, size in enumerate(ranks):
        if step == kill_at:
            saved = json.dumps([state, answer])
            state, kept = json.loads(saved)
            answer = Proportions(*(value and tuple(value) for value in kept))
        sequences = draw(step, answer.shares, tokens)
        np.add.at(tokens, sequences.domain, sequences.targets)
        state, answer = stepped(policy, state, gathered(sequences, step, size), answer)
        out.append(answer)
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_shares_do_not_depend_on_ranks_and_a_killed_run_goes_on_with_them(name):
    """DataFlex keeps no state, and lets each rank mix by its own last micro-batch."""
    whole = run(name, [1] * 15)
    assert run(name, [4] * 15) == whole
    for kill in range(15):
        assert run(name, [4] * kill + [2] * (15 - kill), kill_at=kill) == whole
    if name != "temperature":
        assert len(set(whole)) > 5, "shares follow what is seen"


def test_a_loss_is_that_of_its_own_domain_in_mixed_micro_batches_and_every_one_counts():
    """DataFlex credits a micro-batch to the domain of its first sample, and sees the last one before an update."""
    sequences = draw(0, (0.4, 0.3, 0.3), np.zeros(3))
    seen = gathered(sequences, 0, 2)
    for place in range(3):
        own = sequences.domain == place
        assert seen.losses[place] == math.fsum(sequences.losses[own])
        assert seen.targets[place] == sequences.targets[own].sum()
    policy = chosen_policy("mix", "odm", {}, data_policies("mix"))
    state, last = started(policy, DOMAINS)
    state, _ = stepped(policy, state, seen, last)
    np.testing.assert_allclose(state["rewards"], 0.1 * seen.losses / seen.targets, rtol=1e-12)


def test_an_objective_is_as_large_as_a_mean_whatever_the_number_of_domains():
    """DataFlex multiplies by alpha, of sum 1, and takes the mean: with K domains 1/K of the rate."""
    for count in (2, 7):
        of = DomainsToMix(tuple("abcdefg"[:count]), (1 / count,) * count, (10,) * count)
        policy = chosen_policy("mix", "doremi", {}, data_policies("mix"))
        state, answer = started(policy, of)
        targets = np.arange(1, count + 1) * 10
        seen = SeenDomains(3.0 * targets, targets, targets, np.linspace(0, 1, count) * targets)
        _, answer = stepped(policy, state, seen, answer)
        weights = np.array(answer.objective) / targets  # of every token of a domain
        assert (weights * seen.losses).sum() / (weights * targets).sum() == pytest.approx(3.0, rel=1e-12)
        assert (weights * targets).sum() == pytest.approx(1.0, rel=1e-12)


def test_excess_is_neither_centred_nor_clipped():
    """DataFlex clips it at 5 either side of its mean."""
    policy = chosen_policy("mix", "doremi", {"rate": 0.1, "uniform": 0}, data_policies("mix"))
    state, answer = started(policy, DOMAINS)
    counts = np.array([10, 10, 10])
    _, answer = stepped(
        policy, state, SeenDomains(counts * 60.0, counts, counts, counts * np.array([40.0, 20, 0])), answer
    )
    assert answer.objective[0] / answer.objective[1] == pytest.approx(math.exp(0.1 * 20), rel=1e-12)


def test_no_policy_reads_or_writes_a_file(monkeypatch):
    """DataFlex reuses the cached selection of an older run without a word."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"a file: {args}")

    monkeypatch.setattr(builtins, "open", refuse)
    for name in SETTINGS:
        run(name, [2] * 8)
