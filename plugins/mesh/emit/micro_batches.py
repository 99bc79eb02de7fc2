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
from ....core.plan.order import in_turn
from ....core.plan.rounds import idle
from ....core.plan.step_plan import MicroBatch, Slice
from ..cost_table import CostTable, CpStrategy


def micro_batches(
    pieces: list[Slice], cp_groups: list[Ranks], cost_table: CostTable, *, dummies: bool
) -> list[MicroBatch] | None:
    """The micro-batches of one round; None where no cp_comm suits sequences that meet.

    ``pieces``: what each sequence runs, on ``cp_groups``; ``dummies``: give ranks without work a micro-batch too.
    """
    sharing = Joined(cost_table.limits.num_ranks)
    for cp_group in {cp_group for cp_group in cp_groups if len(cp_group) > 1}:
        sharing.join(cp_group)
    members: dict[int, list[int]] = {}
    for k, cp_group in enumerate(cp_groups):
        members.setdefault(sharing.first(cp_group[0]), []).append(k)
    together: list[MicroBatch] = []
    for numbers in members.values():
        micro_batch = joined([(pieces[k], cp_groups[k]) for k in numbers], cost_table)
        if micro_batch is None:
            return None
        together.append(micro_batch)
    together.sort(key=lambda m: (-_span(m, cost_table.node), -len(m.ranks), m.ranks))
    return together + (idle(together, cost_table.limits.num_ranks) if dummies else [])


def _span(m: MicroBatch, node: int) -> int:
    return max(len({rank // node for rank in cp_group}) for cp_group in m.ranks_of_slices)


def joined(placed: list[tuple[Slice, Ranks]], cost_table: CostTable) -> MicroBatch | None:
    """One micro-batch of slices, each on its CP group; None where no cp_comm suits all."""
    ranks = tuple(sorted({rank for _, cp_group in placed for rank in cp_group}))
    placed = sorted(placed, key=lambda one: (-len(one[1]), -one[0].length, one[0]))
    slices = tuple(piece for piece, _ in placed)
    if len(ranks) == 1:
        return MicroBatch(slices, ranks)
    strategy = common_strategy([(piece.length, cp_group) for piece, cp_group in placed], cost_table)
    if strategy is None:
        return None
    cp_groups = tuple(cp_group for _, cp_group in placed)
    return strategy.micro_batch(slices, ranks, () if set(cp_groups) == {ranks} else cp_groups)


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


def in_packs(lengths: Ints, bins_of_ranks: list[list[list[int]]]) -> list[MicroBatch]:
    """Whole sequences on single ranks, in launch order; ``bins_of_ranks[rank][k]``: numbers of those in one pack."""
    return [
        MicroBatch(tuple(whole(lengths, np.array(sorted(numbers)))), (rank,))
        for rank, numbers in in_turn(bins_of_ranks)
    ]


def whole(lengths: Ints, numbers: Ints) -> list[Slice]:
    """Sequences as slices that are all of them."""
    return [Slice(i, 0, int(lengths[i])) for i in numbers.tolist()]
