"""Whole sequences into micro-batches of each rank, balanced by cost.

Two phases, as in Hydraulis (arXiv 2412.07894): sequences go to data-parallel ranks, then each rank packs its own into
micro-batches. Objective, over assignments of sequences i to ranks r and to micro-batches of at most C tokens:

    minimise  max_r  [ sum_{i in r} c_i  +  launch * m_r  +  (P - 1) * max_b cost(b) ]

    c_i      forward and backward seconds of sequence i on one pipeline stage
    m_r      micro-batches of rank r, at least ceil(tokens_r / C)
    P        pipeline stages: 1F1B idles for P - 1 of the costliest micro-batch

Phase 1 is longest-processing-time with moves and swaps (`core.partition`), phase 2 the same greedy under the token cap,
with the number of micro-batches chosen by the objective. O(K log R + K m); 512 sequences on 64 ranks take about 10 ms
and 65,536 on 1,024 about half a second (benchmarks/planner.py). The global batch is unchanged: only who computes a
sequence, and beside which others. Sequences are not cut here: one that costs more than a rank's mean bounds the step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.costs import Costs
from ...core.errors import EvenloadError
from ...core.partition import Floats, Ints, Load, balance, best_fit_decreasing, into_bins
from ...core.registry import Situation
from ...core.workload import Limits, MicroBatch, Slice, StepPlan
from .config import PackingConfig


def plan(bare: StepPlan, situation: Situation, config: PackingConfig) -> StepPlan:
    """The packed plan of the same batch. Raises EvenloadError for a sequence longer than ``max_tokens``."""
    lengths = lengths_of(bare, config)
    limits = replace(bare.limits, max_tokens=config.max_tokens)
    costs = situation.costs
    bound_s = lower_bound_s(lengths, limits, costs)
    seconds = costs.sequence_s(lengths)
    if limits.equal_counts:
        packs = _in_rounds(seconds, lengths, limits)
    else:
        load = Load(costs.launch_s, config.max_tokens)
        ranks = balance(seconds, lengths, limits.num_ranks, load, target=bound_s)
        items: list[list[int]] = [[] for _ in range(limits.num_ranks)]
        for item, rank in enumerate(ranks.tolist()):
            items[rank].append(item)
        packs = [_pack(mine, seconds, lengths, limits, costs) for mine in items]
    return replace(
        bare,
        micro_batches=interleave(packs, lengths),
        limits=limits,
        order=(),
        recompute=(),
        made_by="packing",
        bound_s=bound_s,
    )


def lengths_of(bare: StepPlan, config: PackingConfig) -> Ints:
    """Lengths int64 [K] of the batch, none over the cap."""
    lengths = np.array([s.length for s in bare.sequences], dtype=np.int64)
    if len(lengths) and lengths.max() > config.max_tokens:
        index = int(lengths.argmax())
        raise EvenloadError(
            "a sequence is longer than plugins.packing.max_tokens",
            f"sequence {index} has {lengths[index]} tokens, the cap is {config.max_tokens}",
            "raise max_tokens, or lower data.max_length (longer samples are split, truncated or dropped)",
        )
    return lengths


def lower_bound_s(lengths: Ints, limits: Limits, costs: Costs) -> float:
    """Certified: no plan of whole sequences has a busiest rank below this [s].

    The largest of: the mean over ranks, launches included; the costliest sequence with the one launch that it needs;
    and the rank of most tokens, which has at least the mean number, the launches these need, and their linear work.
    """
    if not len(lengths):
        return 0.0
    seconds = costs.sequence_s(lengths)
    launches = max(limits.num_ranks, -(-int(lengths.sum()) // limits.max_tokens))
    if len(lengths) < limits.num_ranks:
        launches = len(lengths)
    mean = (float(seconds.sum()) + launches * costs.launch_s) / limits.num_ranks
    tokens = float(lengths.sum()) / limits.num_ranks
    most_tokens = (costs.forward.token_s + costs.backward.token_s) * tokens
    most_tokens += -(-tokens // limits.max_tokens) * costs.launch_s
    return max(mean, most_tokens, float(seconds.max()) + costs.launch_s)


def _pack(
    items: list[int],
    seconds: Floats,
    lengths: Ints,
    limits: Limits,
    costs: Costs,
) -> list[list[int]]:
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


def _in_rounds(seconds: Floats, lengths: Ints, limits: Limits) -> list[list[list[int]]]:
    """Equal counts: the trainer synchronises ranks at every micro-batch, so the step costs the sum of each round's
    costliest. All micro-batches of all ranks are filled evenly at once; sorted by cost, neighbours share a round, dealt
    to the ranks to and fro so that none has the costliest of every round."""
    cost, tokens = seconds.tolist(), lengths.tolist()
    rounds = max(1, -(-sum(tokens) // (limits.max_tokens * limits.num_ranks)))
    bins = into_bins(cost, tokens, limits.max_tokens, rounds * limits.num_ranks)
    while bins is None:
        rounds += 1
        bins = into_bins(cost, tokens, limits.max_tokens, rounds * limits.num_ranks)
    bins.sort(key=lambda b: -sum(cost[i] for i in b))
    per_round = [bins[k * limits.num_ranks : (k + 1) * limits.num_ranks][:: -1 if k % 2 else 1] for k in range(rounds)]
    return [list(mine) for mine in zip(*per_round, strict=True)]


def interleave(packs: list[list[list[int]]], lengths: Ints) -> tuple[MicroBatch, ...]:
    """Launch order: the k-th micro-batch of every rank, then the next of every rank. A rank without work gets a dummy.

    ``packs[r][k]`` lists the sequences of micro-batch k of rank r; an empty list is a dummy.
    """
    sizes = lengths.tolist()
    packs = [mine or [[]] for mine in packs]
    return tuple(
        MicroBatch(tuple(Slice(i, 0, sizes[i]) for i in mine[place]), (rank,))
        for place in range(max(map(len, packs)))
        for rank, mine in enumerate(packs)
        if place < len(mine)
    )
