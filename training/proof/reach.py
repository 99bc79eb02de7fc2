"""Batches that take branches of the runtime which the first batches of a run did not.

What a proof has not run it has not proved. So for the branches that the recipe's settings open (`Plugin.branches`) and
no step has taken yet, batches are composed of the run's own samples - further ones in its order, long ones, short
ones, mixed ones, fewer than there are ranks - and planned under the recipe's caps, with settings that prefer the
branch among those that the recipe allows. Greedily, the batch that takes most missing branches is chosen first, and of
these the smallest. Where ranks may run unequal numbers of passes, a plan may also leave out its dummies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...core.errors import EvenloadError
from ...core.laws import check
from ...core.plan.branches import IDLE_RANKS, PACKED, RANKS_WITHOUT_PASS, branches_of
from ...core.plan.step_plan import Lengths, Op, StepPlan, as_lengths
from ...core.planning.chain import PlanChain

MOST_BATCHES = 3
_BUDGET_S = 20.0
_FURTHER = 8
"""Batches that are composed by chance, in addition to those of extremes."""


class Chosen(NamedTuple):
    """A batch that takes branches which were missing."""

    samples: Lengths
    prefers: str
    """The branch whose chain of `opened` plans it."""
    takes: frozenset[str]


def opened(chain: PlanChain) -> dict[str, PlanChain]:
    """The branches that the settings of a chain open, each with the chain that most likely takes it."""
    chains: dict[str, PlanChain] = {PACKED: chain}
    if chain.limits.num_ranks > 1:
        chains[IDLE_RANKS] = chain
        if not chain.limits.all_in_step:
            chains[RANKS_WITHOUT_PASS] = chain
    for place, (plugin, config) in enumerate(chain.links):
        for name, settings in plugin.needs.branches(config, chain.context).items():
            links = (*chain.links[:place], (plugin, settings), *chain.links[place + 1 :])
            chains[name] = chain if settings == config else replace(chain, links=links)
    for of_layers, config in chain.of_layers:
        chains |= dict.fromkeys(of_layers.needs.branches(config, chain.context), chain)
    return chains


def planned(chain: PlanChain, lengths: Lengths, prefers: str) -> StepPlan:
    """The plan of a batch that takes a branch most likely. Raises EvenloadError."""
    plan = opened(chain)[prefers].plan(as_lengths(lengths))
    return check(without_dummies(plan)) if prefers == RANKS_WITHOUT_PASS else plan


def without_dummies(plan: StepPlan) -> StepPlan:
    """A plan of the same work without dummies: ranks that had nothing else have no pass."""
    numbers = [i for i, m in enumerate(plan.micro_batches) if m.slices]
    backward = [i for i, m in enumerate(plan.passes("B")) if m.slices]
    place = {"F": {i: k for k, i in enumerate(numbers)}, "B": {i: k for k, i in enumerate(backward)}}
    place["W"] = place["B"]
    order = tuple(
        tuple(Op(op.kind, place[op.kind][op.micro_batch]) for op in ops if op.micro_batch in place[op.kind])
        for ops in plan.order
    )
    return replace(
        plan,
        micro_batches=tuple(plan.micro_batches[i] for i in numbers),
        backward=tuple(plan.backward[i] for i in backward) if plan.backward else (),
        replayed=tuple(place["B"][i] for i in plan.replayed if i in place["B"]),
        order=order,
        recompute=tuple(tuple(row[i] for i in numbers) for row in plan.recompute),
        offload=tuple(plan.offload[i] for i in numbers) if plan.offload else (),
    )


def choose(chain: PlanChain, missing: set[str], lengths: Lengths, size: int, seed: int) -> list[Chosen]:
    """Up to `MOST_BATCHES` batches that together take as many of the missing branches as batches here do.

    They are of at most ``size`` of the samples whose ``lengths`` these are.
    """
    until = time.monotonic() + _BUDGET_S
    chains = opened(chain)
    missing = missing & chains.keys()
    tried: list[tuple[Chosen, int]] = []
    for samples in _batches(lengths, size, seed):
        for name in {(id(chains[name]), name == RANKS_WITHOUT_PASS): name for name in sorted(missing)}.values():
            with suppress(EvenloadError):
                plan = planned(chain, lengths[samples], name)
                if takes := missing & branches_of(plan).keys():
                    tried.append((Chosen(samples, name, frozenset(takes)), plan.num_tokens))
        if time.monotonic() > until:
            break
    chosen: list[Chosen] = []
    left = set(missing)
    while tried and len(chosen) < MOST_BATCHES:
        best, _ = max(tried, key=lambda row: (len(row[0].takes & left), -row[1]))
        if not best.takes & left:
            break
        chosen.append(best)
        left -= best.takes
    return chosen


def _batches(lengths: Lengths, size: int, seed: int) -> Iterator[Lengths]:
    """Sample numbers of each batch to try: extremes first, then drawn ones."""
    by_length = np.argsort(lengths, kind="stable")
    size = min(size, len(lengths))
    longest, shortest, median = by_length[::-1], by_length, len(lengths) // 2
    yield shortest[median : median + 1]
    yield longest[:1]
    yield longest[: min(2, size)]
    yield np.concatenate([longest[:1], shortest[: size - 1]])
    yield np.concatenate([longest[: size // 2], shortest[: size - size // 2]])
    yield longest[:size]
    yield by_length[median : median + size]
    yield shortest[:size]
    random = np.random.default_rng(seed)
    for _ in range(_FURTHER):
        yield random.permutation(len(lengths))[: int(random.integers(1, size + 1))].astype(np.int64)
