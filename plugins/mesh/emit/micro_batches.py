"""A round of placed sequences as micro-batches: long ones on many ranks, short ones on one, in the same pass.

Ranks that share no sequence with each other, directly or over others, run micro-batches of their own; each takes the
way of sharing attention that is predicted fastest for all of its sequences. These are Zeppelin's zones (arXiv
2509.21841): sequences across nodes, inside a node and on one rank run side by side, and what is launched first is what
travels farthest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.aliases import Ints, Ranks
from ....core.balance.joined import Joined
from ....core.plan.step_plan import MicroBatch, Slice
from ..cost_table import CostTable, CpStrategy


def micro_batches(
    pieces: list[Slice], cp_groups: list[Ranks], cost_table: CostTable, *, dummies: bool
) -> list[MicroBatch] | None:
    """The micro-batches of one round; None where no cp_comm suits sequences that meet.

    Args:
        pieces: what each sequence runs in this round, on ``cp_groups``.
        dummies: give ranks without work a micro-batch too.
    """
    members: dict[int, list[int]] = {}
    root = _components(cp_groups, cost_table.limits.num_ranks)
    for k, cp_group in enumerate(cp_groups):
        members.setdefault(root[cp_group[0]], []).append(k)
    out: list[MicroBatch] = []
    for together in members.values():
        micro_batch = joined([(pieces[k], cp_groups[k]) for k in together], cost_table)
        if micro_batch is None:
            return None
        out.append(micro_batch)
    out.sort(key=lambda m: (-_span(m, cost_table.node), -len(m.ranks), m.ranks))
    if dummies:
        busy = {rank for m in out for rank in m.ranks}
        out += [MicroBatch((), (rank,)) for rank in range(cost_table.limits.num_ranks) if rank not in busy]
    return out


def _components(cp_groups: list[Ranks], num_ranks: int) -> list[int]:
    """For each rank the first of all ranks that share sequences with it."""
    joined = Joined(num_ranks)
    for cp_group in {cp_group for cp_group in cp_groups if len(cp_group) > 1}:
        joined.join(cp_group)
    return [joined.first(rank) for rank in range(num_ranks)]


def _span(m: MicroBatch, node: int) -> int:
    """Nodes of the micro-batch's widest CP group."""
    return max(len({rank // node for rank in cp_group}) for cp_group in m.ranks_of_slices)


def joined(parts: list[tuple[Slice, Ranks]], cost_table: CostTable) -> MicroBatch | None:
    """One micro-batch of slices, each on its CP group; None where no cp_comm suits all."""
    ranks = tuple(sorted({rank for _, cp_group in parts for rank in cp_group}))
    parts = sorted(parts, key=lambda one: (-len(one[1]), -one[0].length, one[0]))
    slices = tuple(piece for piece, _ in parts)
    if len(ranks) == 1:
        return MicroBatch(slices, ranks)
    strategy = common_strategy([(piece.length, cp_group) for piece, cp_group in parts], cost_table)
    if strategy is None:
        return None
    cp_groups = tuple(cp_group for _, cp_group in parts)
    if all(cp_group == ranks for cp_group in cp_groups):
        cp_groups = ()
    return MicroBatch(slices, ranks, 0, strategy.cp_comm, strategy.ulysses_degree, cp_groups, routed=strategy.routed)


def common_strategy(sequences: list[tuple[int, Ranks]], cost_table: CostTable) -> CpStrategy | None:
    """The fastest way for sequences (tokens, CP group) that run in one micro-batch; None where none suits all."""
    costs = cost_table.context.costs
    forward, backward = (dict.fromkeys((r for _, cp_group in sequences for r in cp_group), 0.0) for _ in range(2))
    shared: list[tuple[int, Ranks]] = []
    for n, cp_group in sequences:
        for rank in cp_group:
            forward[rank] += costs.forward.seconds(n) / len(cp_group)
            backward[rank] += costs.backward.seconds(n) / len(cp_group)
        if len(cp_group) > 1:
            shared.append((n, cp_group))
    best: tuple[float, CpStrategy | None] = (float("inf"), None)
    for strategy in _suiting(shared, cost_table):
        first, second = dict(forward), dict(backward)
        for n, cp_group in shared:
            each = cost_table.exposed(strategy, n, len(cp_group))
            for rank in cp_group:
                first[rank] += each[0]
                second[rank] += each[1]
        seconds = max(first.values()) + max(second.values())
        if seconds < best[0] * (1 - 1e-9):
            best = (seconds, strategy)
    return best[1]


def _suiting(shared: list[tuple[int, Ranks]], cost_table: CostTable) -> Iterator[CpStrategy]:
    degrees = sorted({len(cp_group) for _, cp_group in shared})
    across = max(degrees, default=1) > cost_table.node
    most = len({rank for _, cp_group in shared for rank in cp_group})
    for strategy in cost_table.strategies[1:]:
        if strategy.cp_comm == "hybrid" and (
            any(d % strategy.ulysses_degree for d in degrees) or strategy.ulysses_degree >= most
        ):
            continue
        if (not strategy.routed or across) and np.isfinite(
            [cost_table.exposed(strategy, 1 << 20, d)[0] for d in degrees]
        ).all():
            yield strategy


def packs(pieces: list[Slice], rank: int, bins: list[list[int]]) -> list[MicroBatch]:
    """Micro-batches of whole sequences on one rank."""
    return [MicroBatch(tuple(pieces[k] for k in sorted(numbers)), (rank,)) for numbers in bins]


def whole(lengths: Ints, numbers: Ints) -> list[Slice]:
    """Sequences as slices that are all of them."""
    return [Slice(i, 0, int(lengths[i])) for i in numbers.tolist()]
