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

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...core.aliases import Ints
from ...core.balance.partition import Load, balance, best_fit_decreasing
from ...core.balance.partition import in_order as in_order_bins
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.plan.limits import Limits
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from .candidates.slice_chains import chained
from .config import MeshConfig
from .cost_table import CostTable, CpStrategy, cost_table_of
from .emit.blocks import compute_seconds, fitted, in_blocks
from .emit.micro_batches import common_strategy, whole
from .emit.step import lengths_of, limits_for, step


def cp_all(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = lengths_of(incoming), limits_for(incoming, context, config)
    ranks = tuple(range(limits.num_ranks))
    packs: list[list[Slice]] = []
    free_tokens = 0
    for i, n in enumerate(lengths.tolist()):
        if n > free_tokens or not packs:
            packs.append([])
            free_tokens = limits.num_ranks * (limits.max_tokens - 2)
        packs[-1].append(Slice(i, 0, n))
        free_tokens -= n + 2 * limits.num_ranks  # what uneven chunks may add on one of the ranks
    cost_table = _prices(lengths, context, config, incoming)
    micro_batches = [_on_all(pack, ranks, cost_table) for pack in packs]
    cap = max([limits.max_tokens, *(-(-m.num_tokens // len(m.ranks)) + 2 * len(m.slices) for m in micro_batches)])
    return step(incoming, replace(limits, max_tokens=cap), micro_batches, "cp_all")


def _on_all(pack: list[Slice], ranks: tuple[int, ...], cost_table: CostTable) -> MicroBatch:
    tokens = sum(s.length for s in pack)
    ranks = ranks[:tokens]
    if len(ranks) == 1:
        return MicroBatch(tuple(pack), ranks)
    strategy = common_strategy([(tokens, ranks)], cost_table) or CpStrategy("ring")
    # Very short sequences leave ranks without a token, unless tokens are dealt anew.
    short = max(s.length for s in pack) < 2 * len(ranks)
    return MicroBatch(
        tuple(pack), ranks, 0, strategy.cp_comm, strategy.ulysses_degree, remap=short, routed=strategy.routed
    )


def cp_1(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = lengths_of(incoming), limits_for(incoming, context, config)
    if lengths.max(initial=0) > limits.max_tokens and not limits.whole_sequences:
        sliced = _sliced(incoming, lengths, limits, context, config)
        if sliced is not None:
            return sliced
    cap, costs = limits.max_tokens, context.costs
    ranks = balance(costs.sequence_s(lengths), lengths, limits.num_ranks, Load(costs.launch_s, cap))
    packs: list[list[list[int]]] = []
    for rank in range(limits.num_ranks):
        own = np.flatnonzero(ranks == rank).tolist()
        bins = best_fit_decreasing([int(lengths[i]) for i in own], cap)
        packs.append([[own[i] for i in one] for one in bins])
    return _single(incoming, limits.max_tokens, context, config, packs, "cp_1")


def _sliced(
    incoming: StepPlan, lengths: Ints, limits: Limits, context: PlanningContext, config: MeshConfig
) -> StepPlan | None:
    """With chains of slices on single ranks; None where the cap is too small for a slice."""
    cost_table = cost_table_of(context, limits, config.model_copy(update={"max_degree": 1}), int(lengths.max()))
    price, stages = context.costs.forward.plus(context.costs.backward), limits.num_stages
    divisions = chained(lengths, cost_table, limits)
    blocks = min(divisions, key=lambda blocks: compute_seconds(blocks, price, stages), default=None)
    if blocks is None:
        return None
    return fitted(
        in_blocks(incoming, limits, blocks, "cp_1"),
        activation_budget_bytes(context.cluster, context.costs.memory, limits),
    )


def in_order(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = lengths_of(incoming), limits_for(incoming, context, config)
    packs = in_order_bins(lengths.tolist(), limits.max_tokens)
    dealt = [packs[rank :: limits.num_ranks] for rank in range(limits.num_ranks)]
    return _single(incoming, limits.max_tokens, context, config, dealt, "in_order")


def memory_degree(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    lengths, limits = lengths_of(incoming), limits_for(incoming, context, config)
    cap, costs, num_ranks = limits.max_tokens, context.costs, limits.num_ranks
    cost_table = _prices(lengths, context, config, incoming)
    seconds = costs.sequence_s(lengths).tolist()
    most = 1 << (num_ranks.bit_length() - 1)
    load = np.zeros(num_ranks)
    gangs: list[MicroBatch] = []
    alone: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        n = int(lengths[i])
        degree = min(most, 1 << (-(-n // cap) - 1).bit_length())
        starts = np.arange(0, num_ranks - degree + 1, degree)
        windows = load[: len(starts) * degree].reshape(-1, degree).max(axis=1)
        first = int(starts[windows.argmin()])
        ranks = tuple(range(first, first + degree))
        load[first : first + degree] = windows.min() + seconds[i] / degree
        if degree == 1:
            alone[first].append(i)
        else:
            strategy = common_strategy([(n, ranks)], cost_table) or CpStrategy("ring")
            gangs.append(
                MicroBatch(
                    (Slice(i, 0, n),), ranks, 0, strategy.cp_comm, strategy.ulysses_degree, routed=strategy.routed
                )
            )
    packs = [
        [[own[k] for k in one] for one in best_fit_decreasing([int(lengths[k]) for k in own], cap)] for own in alone
    ]
    fits = max(
        [cap, *(-(-m.num_tokens // len(m.ranks)) + 2 for m in gangs), *(lengths[i] for own in alone for i in own)]
    )
    return step(incoming, replace(limits, max_tokens=int(fits)), [*gangs, *_rows(lengths, packs)], "memory_degree")


BASELINES: dict[str, Callable[[StepPlan, PlanningContext, MeshConfig], StepPlan]] = {
    "cp_all": cp_all,
    "cp_1": cp_1,
    "in_order": in_order,
    "memory_degree": memory_degree,
}


def _single(
    incoming: StepPlan, cap: int, context: PlanningContext, config: MeshConfig, packs: list[list[list[int]]], name: str
) -> StepPlan:
    lengths, limits = lengths_of(incoming), limits_for(incoming, context, config)
    cap = max(cap, int(lengths.max(initial=0)))
    return step(incoming, replace(limits, max_tokens=cap), _rows(lengths, packs), name)


def _rows(lengths: Ints, packs: list[list[list[int]]]) -> list[MicroBatch]:
    """Launch order of ``packs[rank][k]``: the k-th of every rank, then the next of every rank."""
    out: list[MicroBatch] = []
    for place in range(max(map(len, packs), default=0)):
        for rank, rank_packs in enumerate(packs):
            if place < len(rank_packs):
                out.append(MicroBatch(tuple(whole(lengths, np.array(sorted(rank_packs[place])))), (rank,)))
    return out


def _prices(lengths: Ints, context: PlanningContext, config: MeshConfig, incoming: StepPlan) -> CostTable:
    return cost_table_of(context, incoming.limits, config, int(lengths.max(initial=1)))
