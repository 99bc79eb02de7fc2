"""Disjoint groups of ranks for the sequences of one micro-batch: FlexSP's problem without its solver.

FlexSP (arXiv 2412.01523, section 4.1) chooses degrees d_g and sets S_g of sequences,

    minimise  max_g ( launch_s + sum_{k in S_g} seconds[k, d_g] )
    with      sum_g d_g <= N,    sum_{k in S_g} tokens_k <= d_g * cap,    every sequence in one group,

by an integer program that its authors give 5 to 15 seconds. Here: for a multiset of degrees, sequences go longest first
to the group that would be done first among those with room; the multiset is searched from seeds (one degree for all;
the least group that holds the longest sequence next to one degree for all others) by splitting and merging 1, 2 or 4
groups at once; moves and swaps out of the busiest group finish. A multiset whose lower bound (rank-seconds over ranks,
group-seconds over groups, its costliest sequence) is no better than what is known is not tried.

500 sequences on 64 ranks and seven degrees take about 10 ms; benchmarks/planning/mesh.py has the gap to a certified
bound. Not done: sequences whose ranks overlap, and many degrees (the search weighs pairs of them).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from ....core.aliases import Floats, Ints

_PLACEMENTS = 8192
"""Sequences dealt, over all multisets of degrees, after which the search ends,"""
_OVERHEAD = 48
"""and what a multiset takes on top of it."""
_CLOSE = 1.001
"""Time over its lower bound at which the search ends."""
_STEPS = 64
"""Most moves and swaps out of the busiest group."""
_WORTH_POLISHING = 1.04
"""Time over the best one known up to which a neighbour is polished before it is judged; every seed is."""
_AT_ONCE = (1, 2, 4)

Counts = tuple[int, ...]
"""Groups of each of the table's degrees."""


class Table(NamedTuple):
    """What sequences cost on groups of every degree; launches, the same for all, are left out."""

    degrees: Ints
    """[D] ascending."""
    seconds: Floats
    """[K, D]: what sequence k adds to each rank of its group, forward and backward; infinite where it may not run."""


class Group(NamedTuple):
    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    """Numbers of the table's rows."""


def groups_of(
    lengths: Ints, table: Table, num_ranks: int, max_tokens: float, node_ranks: int = 0
) -> tuple[Group, ...] | None:
    """Groups for all sequences at once; None where no way was found to hold them.

    lengths int [K]; ``max_tokens`` of one rank; ``node_ranks``: neighbouring ranks of a node, in which groups of up to
    so many stay, 0 where all are in one.
    """
    search = _Search(lengths, table, num_ranks, max_tokens, node_ranks)
    division = search.run()
    if division is None:
        return None
    members: list[list[int]] = [[] for _ in division.degree_of]
    for k, g in enumerate(division.group_of):
        members[g].append(k)
    places = places_of([int(table.degrees[j]) for j in division.degree_of], num_ranks, node_ranks)
    assert places is not None
    return tuple(Group(ranks, tuple(sequences)) for ranks, sequences in zip(places, members, strict=True) if sequences)


def seconds_of(groups: tuple[Group, ...], table: Table) -> Floats:
    """What each rank of each group works, launches left out [groups]."""
    number = {int(d): j for j, d in enumerate(table.degrees)}
    return np.array([table.seconds[list(g.sequences), number[len(g.ranks)]].sum() for g in groups])


def places_of(degrees: list[int], num_ranks: int, node_ranks: int = 0) -> list[tuple[int, ...]] | None:
    """Ranks for groups of these degrees, largest first; None where one that a node could hold would straddle two.

    A group of several nodes takes whole ones, and what it leaves of its last one is given to others; a smaller one goes
    where it leaves least. Powers of two always fit.
    """
    size = node_ranks or num_ranks
    free = [list(range(start, min(start + size, num_ranks))) for start in range(0, num_ranks, size)]
    places: list[tuple[int, ...]] = []
    for d in degrees:
        if d <= size:
            node = min((n for n in free if len(n) >= d), key=len, default=None)
            if node is None:
                return None
            places.append(tuple(node[:d]))
            del node[:d]
            continue
        taken: list[int] = []
        for node in sorted(free, key=lambda n: -len(n)):  # whole nodes first, in order
            part = node[: d - len(taken)]
            taken += part
            del node[: len(part)]
        if len(taken) < d:
            return None
        places.append(tuple(sorted(taken)))
    return places


class _Filling(NamedTuple):
    """Sequences dealt to the groups of one multiset of degrees."""

    seconds: float
    counts: Counts
    degree_of: list[int]
    """Column of the table of each group."""
    group_of: list[int]
    """Of each sequence."""


class _Search:
    def __init__(self, lengths: Ints, table: Table, num_ranks: int, max_tokens: float, node_ranks: int) -> None:
        self._degrees = [int(d) for d in table.degrees]
        self._num_ranks, self._node_ranks = num_ranks, node_ranks
        self._rooms = table.degrees * max_tokens
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._seconds = np.where(self._lengths[:, None] <= self._rooms, table.seconds, np.inf)
        self._order = np.argsort(-self._lengths, kind="stable").tolist()
        self._rows, self._tokens = self._seconds.tolist(), self._lengths.tolist()
        self._fullness = np.where(np.isfinite(self._seconds), self._lengths[:, None] / self._rooms, np.inf).tolist()
        self._area = self._seconds * table.degrees
        self._sums: dict[tuple[int, ...], tuple[float, float, float]] = {}
        self._tried: set[Counts] = set()
        self._known: list[_Filling] = []
        self._placements = 0

    def run(self) -> _Filling | None:
        """The best multiset found, filled."""
        if not len(self._lengths):
            return _Filling(0.0, (), [], [])
        every = tuple(range(len(self._degrees)))
        area, _, longest = self._sums_over(every)
        enough = max(area / self._num_ranks, longest) * _CLOSE
        best = self._better(None, self._seeds(), np.inf)
        explored: set[Counts] = set()
        while best is not None and best.seconds > enough and self._placements < _PLACEMENTS:
            near = [one for one in self._known if one.counts not in explored]
            if not near:
                break
            start = min(near, key=lambda one: one.seconds)
            explored.add(start.counts)
            best = self._better(best, self._neighbours(start.counts), _WORTH_POLISHING)
        return best

    def _better(self, best: _Filling | None, candidates: Iterator[Counts], worth: float) -> _Filling | None:
        """The best of the candidates, the most promising first, and of what was known. ``worth``: time over the best
        known one up to which a candidate is polished before it is judged."""
        new = {counts for counts in candidates if counts not in self._tried}
        for bound, counts in sorted((self._bound(counts), counts) for counts in new):
            if bound >= (best.seconds if best else np.inf) or self._placements >= _PLACEMENTS:
                break
            self._tried.add(counts)
            degrees = [d for d, n in zip(self._degrees[::-1], counts[::-1], strict=True) for _ in range(n)]
            if places_of(degrees, self._num_ranks, self._node_ranks) is None:
                continue
            filled = self._filled(counts, best.seconds * worth if best else np.inf)
            if filled is not None:
                self._known.append(filled)
                best = min(best or filled, filled, key=lambda one: one.seconds)
        return best

    def _seeds(self) -> Iterator[Counts]:
        fitting = np.flatnonzero(np.isfinite(self._seconds[self._order[0]])).tolist()
        for j, d in enumerate(self._degrees):
            if d <= self._num_ranks:
                yield self._topped_up([0] * len(self._degrees), j)
            for first in fitting[:1]:
                counts = [0] * len(self._degrees)
                counts[first] = 1
                if self._degrees[first] + d <= self._num_ranks:
                    yield self._topped_up(counts, j)

    def _topped_up(self, counts: list[int], at: int) -> Counts:
        """With as many more groups of a degree as there are ranks left, then of the smaller ones."""
        counts = list(counts)
        left = self._num_ranks - sum(d * n for d, n in zip(self._degrees, counts, strict=True))
        for j in range(at, -1, -1):
            counts[j] += left // self._degrees[j]
            left %= self._degrees[j]
        return tuple(counts)

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        """1, 2 or 4 groups in smaller ones of one degree, or as many larger ones in the place of some."""
        for small, a in enumerate(self._degrees):
            for large in range(small + 1, len(self._degrees)):
                parts = self._degrees[large] // a
                for times in _AT_ONCE:
                    if counts[large] >= times:
                        split = list(counts)
                        split[large] -= times
                        split[small] += times * parts
                        yield self._topped_up(split, small)
                    missing = self._degrees[large] * times - a * parts * times
                    if counts[small] >= parts * times and not missing:
                        merged = list(counts)
                        merged[small] -= parts * times
                        merged[large] += times
                        yield tuple(merged)

    def _sums_over(self, used: tuple[int, ...]) -> tuple[float, float, float]:
        """Rank-seconds, group-seconds and the costliest sequence, where each takes the best of the used degrees."""
        if used not in self._sums:
            columns = list(used)
            least = self._seconds[:, columns].min(axis=1)
            area = float(self._area[:, columns].min(axis=1).sum())
            self._sums[used] = area, float(least.sum()), float(least.max())
        return self._sums[used]

    def _bound(self, counts: Counts) -> float:
        used = tuple(j for j, n in enumerate(counts) if n)
        area, work, longest = self._sums_over(used)
        return max(area / sum(self._degrees[j] * counts[j] for j in used), work / sum(counts), longest)

    def _filled(self, counts: Counts, limit: float) -> _Filling | None:
        """Filled by time; by tokens where that finds no room. None: no room, or a group beyond the limit [s]."""
        self._placements += len(self._order) + _OVERHEAD
        degree_of = [j for j in range(len(counts) - 1, -1, -1) for _ in range(counts[j])]
        group_of, full = self._dealt(self._rows, degree_of, limit)
        if full:
            group_of, full = self._dealt(self._fullness, degree_of, np.inf)
        if full or not group_of:
            return None
        group_of, seconds = self._polished(group_of, degree_of)
        return _Filling(seconds, counts, degree_of, group_of)

    def _dealt(self, weights: list[list[float]], degree_of: list[int], limit: float) -> tuple[list[int], bool]:
        """The group of each sequence, longest first to the group with the least sum of weights after it. Nothing where
        some sum reaches the limit, and True where some sequence found no room."""
        heaps = [(j, [(0.0, g) for g, of in enumerate(degree_of) if of == j]) for j in sorted(set(degree_of))]
        for _, heap in heaps:
            heapify(heap)
        rooms, tokens = [float(self._rooms[j]) for j in degree_of], self._tokens
        group_of = [0] * len(tokens)
        for k in self._order:
            row, n = weights[k], tokens[k]
            least, at, chosen = np.inf, 0, -1
            for i, (j, heap) in enumerate(heaps):
                load, g = heap[0]
                if load + row[j] >= least:
                    continue
                if n > rooms[g]:
                    load, g = next((one for one in sorted(heap) if n <= rooms[one[1]]), (np.inf, g))
                    if load + row[j] >= least:
                        continue
                least, at, chosen = load + row[j], i, g
            if chosen < 0:
                return [], True
            if least >= limit:
                return [], False
            rooms[chosen] -= n
            group_of[k] = chosen
            heap = heaps[at][1]
            if heap[0][1] == chosen:
                heapreplace(heap, (least, chosen))
            else:
                heap[next(i for i, (_, g) in enumerate(heap) if g == chosen)] = (least, chosen)
                heapify(heap)
        return group_of, False

    def _polished(self, start: list[int], degrees: list[int]) -> tuple[list[int], float]:
        """The group of each sequence after moves and swaps out of the busiest group, and its time."""
        group_of, degree_of = np.array(start, dtype=np.int64), np.array(degrees, dtype=np.int64)
        count = len(degree_of)
        numbers = np.arange(len(group_of))
        loads: Floats = np.zeros(count)
        free_tokens: Floats = self._rooms[degree_of].astype(np.float64)
        np.add.at(loads, group_of, self._seconds[numbers, degree_of[group_of]])
        np.subtract.at(free_tokens, group_of, self._lengths)
        for _ in range(_STEPS):
            top = int(loads.argmax())
            step = self._step(group_of, degree_of, loads, free_tokens, top)
            if step is None:
                break
            out, other, back = step
            for k, source, to in [(out, top, other), *([(back, other, top)] if back >= 0 else [])]:
                group_of[k] = to
                loads[source] -= self._seconds[k, degree_of[source]]
                loads[to] += self._seconds[k, degree_of[to]]
                free_tokens[source] += self._lengths[k]
                free_tokens[to] -= self._lengths[k]
        return group_of.tolist(), float(loads.max())

    def _step(
        self, group_of: Ints, degree_of: Ints, loads: Floats, free_tokens: Floats, top: int
    ) -> tuple[int, int, int] | None:
        """(sequence out of the busiest group, where to, sequence back or -1) that lowers the larger of both most."""
        busiest = np.flatnonzero(group_of == top)
        others = np.flatnonzero(group_of != top)
        most = float(loads[top])
        here, n = self._seconds[busiest, degree_of[top]], self._lengths[busiest]
        moved = loads[None, :] + self._seconds[np.ix_(busiest, degree_of)]
        moved = np.where(n[:, None] <= free_tokens[None, :], np.maximum(moved, (most - here)[:, None]), np.inf)
        moved[:, top] = np.inf
        best = int(moved.argmin())
        value, step = float(moved.flat[best]), (int(busiest[best // len(loads)]), best % len(loads), -1)
        if len(others):
            to = group_of[others]
            gain = (loads[to] - self._seconds[others, degree_of[to]])[None, :]
            theirs = gain + self._seconds[np.ix_(busiest, degree_of[to])]
            ours = (most - here)[:, None] + self._seconds[others, degree_of[top]][None, :]
            more = n[:, None] - self._lengths[others][None, :]
            fits = (more <= free_tokens[to][None, :]) & (-more <= free_tokens[top])
            swapped = np.where(fits, np.maximum(theirs, ours), np.inf)
            best = int(swapped.argmin())
            if swapped.flat[best] < value:
                value = float(swapped.flat[best])
                other = int(others[best % len(others)])
                step = (int(busiest[best // len(others)]), int(group_of[other]), other)
        return step if value < most * (1 - 1e-9) else None
