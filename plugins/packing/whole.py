"""Whole sequences into micro-batches of each rank, balanced by cost: the plan that cuts nothing.

Two phases, as in Hydraulis (arXiv 2412.07894): sequences go to data-parallel ranks, then each rank packs its own into
micro-batches. Objective, over assignments of sequences i to ranks r and to micro-batches of at most C tokens:

    minimise  max_r  [ sum_{i in r} c_i  +  launch * m_r  +  (P - 1) * max_b cost(b) ]

    c_i      forward and backward seconds of sequence i on one pipeline stage
    m_r      micro-batches of rank r, at least ceil(tokens_r / C)
    P        pipeline stages: 1F1B idles for P - 1 of the costliest micro-batch

Phase 1 is longest-processing-time with moves and swaps (`core.balance.partition`), phase 2 the same greedy under the
token cap, with the number of micro-batches chosen by the objective. O(K log R + K m).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.balance.partition import EVEN, BinLoad, balance, best_fit_decreasing, into_bins, members
from ...core.costs.costs import Costs
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan

_CLOSE = 1.0002
"""Fullest rank over mean up to which groups or equal counts are polished: few large units, of which each move tells.
Below 1.001 no baseline is planned for large batches, so it takes less time on the whole."""


class Units(NamedTuple):
    """What stays together: groups of sequences, or each sequence by itself."""

    of: Ints
    """Unit of each sequence, int64 [K]."""
    seconds: Floats
    """float64 [U]."""
    tokens: Ints
    """int64 [U]."""


def units_of(incoming: StepPlan, costs: Costs) -> Units:
    """The units of a plan's sequences."""
    lengths = incoming.lengths
    seconds = costs.sequence_s(lengths)
    if not len(incoming.groups):
        return Units(np.arange(len(lengths)), seconds, lengths)
    of = np.unique(incoming.groups, return_inverse=True)[1]
    return Units(of, np.bincount(of, seconds).astype(np.float64), np.bincount(of, lengths).astype(np.int64))


def keeps_units(incoming: StepPlan, limits: Limits) -> bool:
    """Whether sequences may not be dealt freely over ranks."""
    return bool(len(incoming.groups)) or limits.equal_size


def whole_packs(incoming: StepPlan, limits: Limits, costs: Costs, bound_s: float) -> list[list[list[int]]]:
    """``result[r][k]``: the sequences of micro-batch k of rank r; none is over the cap, nor is a group that is to be in
    one micro-batch."""
    lengths = incoming.lengths
    if limits.together > 1 and not keeps_units(incoming, limits):
        return _in_rounds(lengths, limits, costs)
    units, ranks = _dealt(incoming, limits, costs, bound_s)
    if limits.groups_in_micro_batch:
        inside = members(units.of, len(units.tokens))
    else:
        units, ranks = Units(units.of, costs.sequence_s(lengths), lengths), ranks[units.of]
        inside = [[i] for i in range(len(lengths))]
    items = members(ranks, limits.num_ranks)
    packs = [_pack(own, units.seconds, units.tokens, limits, costs) for own in items]
    if limits.together > 1:  # the costliest of every rank run at once
        packs = [sorted(of_rank, key=lambda pack: -float(units.seconds[pack].sum())) for of_rank in packs]
    return [[[i for unit in pack for i in inside[unit]] for pack in of_rank] for of_rank in packs]


def by_launches(incoming: StepPlan, limits: Limits, costs: Costs, bound_s: float) -> list[list[int]]:
    """Sequences of each rank, balanced with the launches that their tokens need."""
    units, ranks = _dealt(incoming, limits, costs, bound_s)
    return members(ranks[units.of], limits.num_ranks)


def _dealt(incoming: StepPlan, limits: Limits, costs: Costs, bound_s: float) -> tuple[Units, Ints]:
    """The units and the rank of each."""
    units, load = units_of(incoming, costs), BinLoad(costs.launch_s, limits.max_tokens)
    even, ranks = _CLOSE if keeps_units(incoming, limits) else EVEN, limits.num_ranks
    equal = limits.equal_size
    return units, balance(units.seconds, units.tokens, ranks, load, target=bound_s, equal_size=equal, even=even)


def _pack(items: list[int], seconds: Floats, lengths: Ints, limits: Limits, costs: Costs) -> list[list[int]]:
    """Micro-batches of one rank, as few as fit; more where a pipeline gains by smaller ones."""
    cost, tokens = seconds[items].tolist(), lengths[items].tolist()
    least = -(-sum(tokens) // limits.max_tokens) if items else 0
    best: list[list[int]] = []
    best_s = float("inf")
    tries = range(least, min(len(items), least + 4 * limits.num_stages if limits.num_stages > 1 else least) + 1)
    for count in tries:
        bins = into_bins(cost, tokens, limits.max_tokens, count)
        if bins is None:
            continue
        fills = [sum(cost[i] for i in b) + costs.launch_s for b in bins if b]
        total = sum(fills) + (limits.num_stages - 1) * max(fills, default=0.0)
        if total < best_s:
            best, best_s = bins, total
    if not best and items:
        best = best_fit_decreasing(tokens, limits.max_tokens)
    return [[items[i] for i in b] for b in best if b]


def _in_rounds(lengths: Ints, limits: Limits, costs: Costs) -> list[list[list[int]]]:
    """Ranks that run every micro-batch together: a step costs the sum of each round's costliest. All micro-batches of
    all ranks are filled evenly at once; sorted by what they cost apart from experts, whose work a group shares,
    neighbours are a round, and the rounds go to the groups of ranks to and fro, and so do a round's micro-batches to
    its ranks, so that none has the costliest of every round."""
    bins = _even_bins(lengths, limits, costs)
    own = costs.at_experts(0.0).sequence_s(lengths).tolist()
    bins.sort(key=lambda b: -sum(own[i] for i in b))
    ranks, size = limits.num_ranks, limits.together
    groups, rounds = ranks // size, len(bins) // ranks
    together = [bins[k * size : (k + 1) * size] for k in range(rounds * groups)]
    packs: list[list[list[int]]] = [[] for _ in range(ranks)]
    for k in range(rounds):
        for group, round_ in enumerate(together[k * groups : (k + 1) * groups][:: -1 if k % 2 else 1]):
            for member, b in enumerate(round_[:: -1 if k % 2 else 1]):
                packs[group * size + member].append(b)
    return packs


def _even_bins(lengths: Ints, limits: Limits, costs: Costs) -> list[list[int]]:
    """Equally costly micro-batches of all ranks, as few rounds as fit; more where a pipeline gains by smaller ones."""
    cost, tokens = costs.sequence_s(lengths).tolist(), lengths.tolist()
    ranks, stages = limits.num_ranks, limits.num_stages
    rounds = max(1, -(-sum(tokens) // (limits.max_tokens * ranks)))
    while (best := into_bins(cost, tokens, limits.max_tokens, rounds * ranks)) is None:
        rounds += 1
    if stages == 1:
        return best

    def step_s(bins: list[list[int]]) -> float:
        longest: float = max(sum(cost[i] for i in b) for b in bins) + costs.launch_s
        return (len(bins) // ranks + stages - 1) * longest

    most = min(rounds + 4 * stages, max(rounds, len(tokens) // ranks))
    tried = (into_bins(cost, tokens, limits.max_tokens, n * ranks) for n in range(rounds + 1, most + 1))
    return min([best, *(bins for bins in tried if bins is not None)], key=step_s)
