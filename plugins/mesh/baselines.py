"""What others do with the same batch, as plans: the yardsticks of `evenload plan` and `evenload bench`.

cp_all          every sequence on all ranks, packed in order: static context parallelism of the whole plane
cp_1            sequences on single ranks, balanced by cost, in packs under the token cap; what is over it in slices
in_order        packs in the order of the batch on single ranks, dealt out in turn
memory_degree   as many ranks as the tokens of a sequence fill, rounded up to a power of two, on aligned neighbours; the
                least loaded first (Megatron-Core's BalancedCPScheduler, core/pipeline_parallel/hybrid_cp_schedule.py in
                0.16.1, chooses degrees so; ByteScale's D(s) without the rounding)

A sequence longer than the cap runs by itself in in_order, over the cap, and so it does in cp_1 where it may not be cut:
they show what sharing saves. cp_all and memory_degree heed none of the section's other settings (`settings.breaks`).
All are run by the same code as evenload's own plans, memory_degree with short sequences packed, which 0.16.1 does not
do.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heapreplace

import numpy as np

from ...core.balance.partition import BinLoad, balance, best_fit_decreasing, members
from ...core.balance.partition import in_order as in_order_bins
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.plan.limits import Limits
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from ...core.registry import Baseline, Sizes
from .candidates.slice_chains import chained
from .config import MeshConfig
from .cost_table import CostTable, CpStrategy, cost_table_of
from .emit.blocks import compute_seconds, fitted, in_blocks
from .emit.micro_batches import common_strategy, in_packs, whole
from .emit.step import limits_for, step


def cp_all(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = incoming.lengths, limits_for(incoming, context, config)
    ranks = tuple(range(limits.num_ranks))
    # Uneven chunks may add two tokens of each sequence on one of the ranks.
    packs = in_order_bins((lengths + 2 * len(ranks)).tolist(), limits.max_tokens * len(ranks))
    cost_table = _cost_table(incoming, context, config)
    micro_batches = [_on_all(whole(lengths, np.array(pack)), ranks, cost_table) for pack in packs]
    cap = max([limits.max_tokens, *(-(-m.num_tokens // len(m.ranks)) + 2 * len(m.slices) for m in micro_batches)])
    return step(incoming, replace(limits, max_tokens=cap), micro_batches, "cp_all")


def _on_all(pack: list[Slice], ranks: tuple[int, ...], cost_table: CostTable) -> MicroBatch:
    tokens = sum(s.length for s in pack)
    ranks = ranks[:tokens]
    if len(ranks) == 1:
        return MicroBatch(tuple(pack), ranks)
    # Very short sequences leave ranks without a token, unless tokens are dealt anew.
    short = max(s.length for s in pack) < 2 * len(ranks)
    return _strategy(tokens, ranks, cost_table).micro_batch(pack, ranks, remap=short)


def cp_1(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = incoming.lengths, limits_for(incoming, context, config)
    if lengths.max(initial=0) > limits.max_tokens and not limits.whole_sequences:
        sliced = _sliced(incoming, limits, context, config)
        if sliced is not None:
            return sliced
    cap, costs = limits.max_tokens, context.costs
    ranks = balance(costs.sequence_s(lengths), lengths, limits.num_ranks, BinLoad(costs.launch_s, cap))
    items = members(ranks, limits.num_ranks)
    return _single(incoming, limits, [best_fit_decreasing(lengths, cap, of_rank) for of_rank in items], "cp_1")


def _sliced(incoming: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> StepPlan | None:
    """With chains of slices on single ranks; None where the cap is too small for a slice."""
    alone = config.model_copy(update={"max_degree": 1})
    divisions = chained(incoming.lengths, cost_table_of(context, limits, alone, int(incoming.lengths.max())), limits)
    price, stages = context.costs.both, limits.num_stages
    blocks = min(divisions, key=lambda blocks: compute_seconds(blocks, price, stages), default=None)
    if blocks is None:
        return None
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, limits)
    return fitted(in_blocks(incoming, limits, blocks, "cp_1"), budget_bytes)


def in_order(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    limits = limits_for(incoming, context, config)
    packs = in_order_bins(incoming.lengths.tolist(), limits.max_tokens)
    return _single(incoming, limits, [packs[rank :: limits.num_ranks] for rank in range(limits.num_ranks)], "in_order")


def memory_degree(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = incoming.lengths, limits_for(incoming, context, config)
    cap, costs, num_ranks = limits.max_tokens, context.costs, limits.num_ranks
    cost_table = _cost_table(incoming, context, config)
    seconds = costs.sequence_s(lengths).tolist()
    most = 1 << (num_ranks.bit_length() - 1)
    load = np.zeros(num_ranks)
    shared: list[MicroBatch] = []
    alone: list[list[int]] = [[] for _ in range(num_ranks)]
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    wide = int((lengths > cap).sum()) if most > 1 else 0
    for i in longest_first[:wide]:
        n = int(lengths[i])
        degree = min(most, 1 << (-(-n // cap) - 1).bit_length())
        windows = load[: num_ranks // degree * degree].reshape(-1, degree).max(axis=1)
        first = int(windows.argmin()) * degree
        ranks = tuple(range(first, first + degree))
        load[first : first + degree] = windows.min() + seconds[i] / degree
        shared.append(_strategy(n, ranks, cost_table).micro_batch((Slice(i, 0, n),), ranks))
    least = [(float(seconds_s), rank) for rank, seconds_s in enumerate(load)]
    heapify(least)
    for i in longest_first[wide:]:
        seconds_s, rank = least[0]
        heapreplace(least, (seconds_s + seconds[i], rank))
        alone[rank].append(i)
    packs = in_packs(lengths, [best_fit_decreasing(lengths, cap, numbers) for numbers in alone])
    held = [max(tokens_of_ranks(m).values()) for m in shared] + [s.length for m in packs for s in m.slices]
    return step(incoming, replace(limits, max_tokens=max([cap, *held])), [*shared, *packs], "memory_degree")


_COSTLY = Sizes(shown=1 << 30, tried=1 << 30)
BASELINES = {
    "cp_all": Baseline(cp_all, sizes=_COSTLY),
    "cp_1": Baseline(cp_1, "on one rank"),
    "in_order": Baseline(in_order, "whole"),
    "memory_degree": Baseline(memory_degree, sizes=_COSTLY),
}


def _single(incoming: StepPlan, limits: Limits, bins_of_ranks: list[list[list[int]]], name: str) -> StepPlan:
    """Packs on single ranks, under a cap that holds the longest sequence."""
    cap = max(limits.max_tokens, int(incoming.lengths.max(initial=0)))
    return step(incoming, replace(limits, max_tokens=cap), in_packs(incoming.lengths, bins_of_ranks), name)


def _strategy(tokens: int, ranks: tuple[int, ...], cost_table: CostTable) -> CpStrategy:
    return common_strategy([(tokens, ranks)], cost_table) or CpStrategy("ring")


def _cost_table(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> CostTable:
    return cost_table_of(context, incoming.limits, config, int(incoming.lengths.max(initial=1)))
