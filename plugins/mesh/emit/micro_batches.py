"""A round of placed sequences as micro-batches: long ones on many ranks, short ones on one, in the same pass.

Ranks that share no sequence with each other, directly or over others, run micro-batches of their own; each takes the
way of sharing attention that is predicted fastest for all of its sequences. These are Zeppelin's zones (arXiv
2509.21841): sequences across nodes, inside a node and on one rank run side by side, and what is launched first is what
travels farthest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.balance.partition import Ints
from ....core.plan.step_plan import MicroBatch, Slice
from ..assign import Ranks
from ..cost_table import Prices, Way


def micro_batches(pieces: list[Slice], homes: list[Ranks], prices: Prices, *, dummies: bool) -> list[MicroBatch] | None:
    """The micro-batches of one round; None where no engine suits sequences that meet.

    Args:
        pieces: what each sequence runs in this round, on ``homes``.
        dummies: give ranks without work a micro-batch too.
    """
    members: dict[int, list[int]] = {}
    root = _components(homes, prices.limits.num_ranks)
    for k, home in enumerate(homes):
        members.setdefault(root[home[0]], []).append(k)
    found: list[MicroBatch] = []
    for mine in members.values():
        made = joined([(pieces[k], homes[k]) for k in mine], prices)
        if made is None:
            return None
        found.append(made)
    found.sort(key=lambda m: (-_span(m, prices.node), -len(m.ranks), m.ranks))
    if dummies:
        busy = {rank for m in found for rank in m.ranks}
        found += [MicroBatch((), (rank,)) for rank in range(prices.limits.num_ranks) if rank not in busy]
    return found


def _components(homes: list[Ranks], num_ranks: int) -> list[int]:
    """For each rank the first of all ranks that share sequences with it."""
    parent = list(range(num_ranks))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for home in {home for home in homes if len(home) > 1}:
        for rank in home[1:]:
            a, b = sorted((root(home[0]), root(rank)))
            parent[b] = a
    return [root(rank) for rank in range(num_ranks)]


def _span(m: MicroBatch, node: int) -> int:
    """Nodes of the micro-batch's widest home."""
    homes = m.homes or (m.ranks,)
    return max(len({rank // node for rank in home}) for home in homes)


def joined(mine: list[tuple[Slice, Ranks]], prices: Prices) -> MicroBatch | None:
    """One micro-batch of slices, each on its home; None where no engine suits all."""
    ranks = tuple(sorted({rank for _, home in mine for rank in home}))
    mine = sorted(mine, key=lambda one: (-len(one[1]), -one[0].length, one[0]))
    slices = tuple(piece for piece, _ in mine)
    if len(ranks) == 1:
        return MicroBatch(slices, ranks)
    way = common_way([(piece.length, home) for piece, home in mine], prices)
    if way is None:
        return None
    homes = tuple(home for _, home in mine)
    if all(home == ranks for home in homes):
        homes = ()
    return MicroBatch(slices, ranks, 0, way.engine, way.inner, homes, routed=way.routed)


def common_way(sequences: list[tuple[int, Ranks]], prices: Prices) -> Way | None:
    """The fastest way for sequences (tokens, home) that run in one micro-batch; None where none suits all."""
    costs = prices.situation.costs
    forward, backward = (dict.fromkeys((r for _, home in sequences for r in home), 0.0) for _ in range(2))
    shared: list[tuple[int, Ranks]] = []
    for n, home in sequences:
        for rank in home:
            forward[rank] += costs.forward.seconds(n) / len(home)
            backward[rank] += costs.backward.seconds(n) / len(home)
        if len(home) > 1:
            shared.append((n, home))
    best: tuple[float, Way | None] = (float("inf"), None)
    for way in _suiting(shared, prices):
        first, second = dict(forward), dict(backward)
        for n, home in shared:
            each = prices.exposed(way, n, len(home))
            for rank in home:
                first[rank] += each[0]
                second[rank] += each[1]
        seconds = max(first.values()) + max(second.values())
        if seconds < best[0] * (1 - 1e-9):
            best = (seconds, way)
    return best[1]


def _suiting(shared: list[tuple[int, Ranks]], prices: Prices) -> Iterator[Way]:
    degrees = sorted({len(home) for _, home in shared})
    across = max(degrees, default=1) > prices.node
    most = len({rank for _, home in shared for rank in home})
    for way in prices.ways[1:]:
        if way.engine == "hybrid" and (any(d % way.inner for d in degrees) or way.inner >= most):
            continue
        if (not way.routed or across) and np.isfinite([prices.exposed(way, 1 << 20, d)[0] for d in degrees]).all():
            yield way


def packs(pieces: list[Slice], rank: int, bins: list[list[int]]) -> list[MicroBatch]:
    """Micro-batches of whole sequences on one rank."""
    return [MicroBatch(tuple(pieces[k] for k in sorted(mine)), (rank,)) for mine in bins]


def whole(lengths: Ints, numbers: Ints) -> list[Slice]:
    """Sequences as slices that are all of them."""
    return [Slice(i, 0, int(lengths[i])) for i in numbers.tolist()]
