"""Sequences to ranks so that all micro-batches of the batch cost alike: phase 1 of the sliced plan.

The unit is a *slot*, one micro-batch of cost t. An ordinary rank has q of them; a sequence that costs more than q t
gets a rank of its own with ceil(c / t) slots, filled up with other sequences like any rank. No rank is filled beyond B,
the step's bound (the mean over ranks, or the costliest sequence). With m_r the slots of rank r, t is

    the least uneven    t sum_r m_r / total     with    sum_r min(m_r t, B)  >=  total

found by a scan. Sequences are then filled in by `core.balance.level`. Where forward and backward have groups of their
own, each direction has its own t and slots, and sequences fill both capacities at once: a rank rich in attention has
more to do in the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.balance.level import level, loads
from .slicing import EVEN

_SLACK = 1.0005
"""How far over the bound a rank's capacity may lie."""
_ROOM = 1.002
"""Capacity of all ranks over the work of all sequences: what polishing needs to bring every rank under its capacity."""
_CLOSED = 0.998
"""Share of its capacity from which a rank's own sequence leaves no room for others."""
_TRIES = 3
"""Starts of the search where the first leaves a rank too full."""
_SHUFFLE = 0.15
"""Each try after the first multiplies sizes, for their order alone, by up to this much more."""
_SMALL = 4096
"""Sequences up to which it is tried again; with more there are small ones enough to fill every gap."""
_PAIRS = 48
"""Best slot sizes of each direction that are weighed in pairs."""
_SCAN = np.arange(0.4, 1.6, 0.0025)
"""Slots tried, over the mean rank's share of what outliers leave."""


class Slots(NamedTuple):
    """What each rank has room for, in one direction or in both together."""

    counts: list[int]
    """Micro-batches of each rank."""
    capacity: Floats
    """Seconds of each rank, float64 [R]."""
    own: int
    """The costliest sequences that have ranks of their own: the i-th has rank i."""


class _Scan(NamedTuple):
    """All slot sizes tried for one direction: a row each, and a column for each rank."""

    counts: Floats
    capacity: Floats
    own: Ints
    uneven: Floats
    """Slot size over the mean micro-batch, float64 [T]; infinite where the capacity does not hold everything."""


def slots(rows: Floats, num_ranks: int, per_rank: int) -> list[Slots]:
    """The most even slots for each row of seconds, float64 [D, K], D = 1 or 2, sequences in descending order.

    ``per_rank`` is q above. Of two rows a pair is chosen, so that what both leave to other sequences has their shape.
    """
    scans = [_scan(row, num_ranks, per_rank) for row in rows]
    if len(scans) == 1:
        return [_pick(scans[0], int(scans[0].uneven.argmin()))]
    first, second = (np.argsort(scan.uneven, kind="stable")[:_PAIRS] for scan in scans)
    own = max(int(scan.own.max()) for scan in scans)
    held = np.zeros((2, num_ranks))
    held[:, :own] = rows[:, :own]
    small = rows[:, own:].sum(axis=1)
    ratio = small[1] / small[0] if small[0] else 1.0
    room_f = (scans[0].capacity[first] - held[0]).clip(0)[:, None]
    room_b = (scans[1].capacity[second] - held[1]).clip(0)[None] / ratio
    overflow = small[0] / np.maximum(np.minimum(room_f, room_b).sum(axis=2), 1e-300)
    uneven = np.maximum(scans[0].uneven[first][:, None], scans[1].uneven[second][None]) * np.maximum(1.0, overflow)
    i, j = divmod(int(uneven.argmin()), uneven.shape[1])
    return [_pick(scans[0], int(first[i])), _pick(scans[1], int(second[j]))]


def _pick(scan: _Scan, row: int) -> Slots:
    return Slots(scan.counts[row].astype(int).tolist(), scan.capacity[row], int(scan.own[row]))


def _scan(seconds: Floats, num_ranks: int, per_rank: int) -> _Scan:
    all_s = float(seconds.sum())
    top = seconds[: num_ranks - 1]
    left_s = np.concatenate([[all_s], all_s - np.cumsum(top)])
    ordinary_s = left_s / (num_ranks - np.arange(len(left_s)))
    alone = int((top > ordinary_s[:-1]).cumprod().sum())
    # No sequence may be left for ordinary ranks; their slots then matter to nobody.
    slot_s = ((ordinary_s[alone] or float(seconds[-1])) / per_rank * _SCAN)[:, None]
    bound_s = max(all_s / num_ranks, float(seconds[0])) * _SLACK
    heavy = top > slot_s * per_rank * (1 + EVEN)
    counts = np.full((len(slot_s), num_ranks), float(per_rank))
    counts[:, : len(top)] = np.where(heavy, np.maximum(np.ceil(top / slot_s - EVEN), per_rank), per_rank)
    capacity = np.minimum(counts * slot_s, bound_s)
    fits = capacity.sum(axis=1) >= all_s * _ROOM
    if len(seconds) >= num_ranks:
        # One more than there are ranks to give away, and it would share a rank that has no slot for it.
        fits &= seconds[num_ranks - 1] <= slot_s[:, 0] * per_rank * (1 + EVEN)
    uneven = np.where(fits, slot_s[:, 0] * counts.sum(axis=1) / all_s, np.inf)
    # Equal slots for all, for when nothing else fits; and then they do.
    equal = np.full(num_ranks, all_s / num_ranks)
    return _Scan(
        np.vstack([counts, np.full(num_ranks, float(per_rank))]),
        np.vstack([capacity, equal]),
        np.append(heavy.sum(axis=1), 0),
        np.append(uneven, max(1.0, float(seconds[0]) / equal[0]) if alone == 0 else 1e9),
    )


def dispatch(weights: Floats, directions: list[Slots]) -> list[list[int]]:
    """Sequences of each rank, as places in ``weights`` float64 [D, K], whose rows descend; a row for each of ``ways``.

    Longest first, polished; where that leaves a rank too full, again from orders shuffled a little (Hydraulis, arXiv
    2412.07894, dispatches 50 to 100 random orders), and the best is taken. The same on every rank.
    """
    own = max(direction.own for direction in directions)
    num_ranks = len(directions[0].counts)
    items: list[list[int]] = [[rank] if rank < own else [] for rank in range(num_ranks)]
    free = weights[:, own:]
    capacity = np.array([direction.capacity for direction in directions])
    base = np.zeros_like(capacity)
    base[:, :own] = weights[:, :own]
    # A rank that its own sequence fills to the bound takes nothing more, however full the others get.
    fill = (base / capacity).max(axis=0)
    still = np.flatnonzero(fill < max(_CLOSED, float(fill.min()) + EVEN))
    random = np.random.default_rng(0)
    best, best_fill = None, np.inf
    for attempt in range(_TRIES if free.shape[1] <= _SMALL else 1):
        noise = random.random(free.shape[1]) * (attempt * _SHUFFLE)
        bins = level(free, capacity[:, still], base[:, still], noise)
        fullest = float(((base[:, still] + loads(free, len(still), bins)) / capacity[:, still]).max())
        if fullest < best_fill:
            best, best_fill = bins, fullest
        if fullest <= 1 + 2 * EVEN:
            break
    assert best is not None
    for item, place in enumerate(best.tolist()):
        items[int(still[place])].append(own + item)
    return items
