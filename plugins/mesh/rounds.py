"""How a batch is divided into rounds, in each of which all ranks run one micro-batch.

    minimise  sum_m C_m + (P - 1) max_m C_m + (M + P - 1) * launch_s      with  sum_{k in round m} tokens_k <= N * cap

``C_m`` is the time of round m if its sequences level (`place.target_of`), P the pipeline stages, M the rounds. Two
ways:

by length   consecutive runs of the batch in the order of length, the best ones by dynamic programming over P boundaries
            and a grid of targets. Long sequences meet in one round, which is filled to the token cap: there they are
            shared by few ranks, and the rounds of short ones pass quickly. FlexSP (arXiv 2412.01523, section 4.2) also
            cuts the sorted batch, into runs of equal tokens
even        every round gets the like of every other one: what pipelines want

O(P^2 (M + targets)).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...core.level import level
from ...core.partition import Floats, Ints
from .place import Frame, columns_for, target_of
from .prices import Shares

_BOUNDARIES = 96
_TARGETS = 48
_MORE = 4
"""Rounds that are tried beyond those that the tokens need."""
_TILTS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.65, 1.8)
"""Time of the first round over the mean."""
_FILLS = (0.98, 1.0, 0.9)
"""Shares of the token cap to which rounds are filled, until one can be placed."""


class Division(NamedTuple):
    """A batch in rounds."""

    rounds: list[Ints]
    """Numbers of sequences."""
    seconds: float
    """Of a step, estimated."""


class _Table(NamedTuple):
    """Sums over the batch, longest first, up to each boundary."""

    ends: Ints
    """[P + 1]"""
    tokens: Floats
    areas: Floats
    """[targets, P + 1] rank-seconds under each target."""
    shared_areas: Floats
    """The same of sequences on several ranks alone,"""
    shared_tokens: Floats
    """and their tokens."""
    targets: Floats
    alone: Floats
    """[P + 1] least seconds of the sequence at each boundary."""


def fewest_rounds(lengths: Ints, frame: Frame) -> int:
    """Rounds that hold all tokens."""
    return max(1, -(-int(lengths.sum()) // int(frame.num_ranks * frame.cap)))


def divisions(
    lengths: Ints, shares: Shares, frame: Frame, launch_s: float, stages: int, most: int
) -> Iterator[Division]:
    """Divisions of the batch, those of least estimated time first. lengths int64 [K]."""
    order = np.argsort(-lengths, kind="stable")
    least = fewest_rounds(lengths, frame)
    found: list[Division] = []
    table = _tabulated(lengths[order], shares.rows(order), frame)
    for fill in _FILLS:
        segments = _segments(table, frame, fill)
        counts = range(least, min(len(lengths), least + _MORE + (4 * (stages - 1))) + 1)
        found += _by_length(table, segments, order, counts, launch_s, stages)
        if found:
            break
    for count in range(least, min(len(lengths), least + (1 if stages == 1 else 2 * stages)) + 1):
        found += _mixed(lengths, shares, frame, count, launch_s, stages)
    found.sort(key=lambda one: one.seconds)
    yield from found[:most]


def _tabulated(lengths: Ints, shares: Shares, frame: Frame) -> _Table:
    """``lengths`` descending, ``shares`` alike."""
    count = len(lengths)
    tokens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.float64)
    # Boundaries after equal shares of the tokens and of the sequences, every one of the longest.
    wanted = np.linspace(0, tokens[-1], _BOUNDARIES // 2)
    ends = np.unique(
        np.concatenate(
            [
                np.arange(min(count, _BOUNDARIES // 4)),
                np.searchsorted(tokens, wanted),
                np.linspace(0, count, _BOUNDARIES // 4).astype(np.int64),
                [count],
            ]
        ).clip(0, count)
    )
    seconds = np.where(shares.tokens <= frame.longest_share, shares.seconds, np.inf)
    alone = np.append(seconds.min(axis=1), 0.0)
    area = (seconds * shares.degrees).min(axis=1)
    most_s = max(float(alone.max()), 2.0 * float(area.sum()) / frame.num_ranks)
    targets = np.geomspace(most_s / 64, most_s, _TARGETS)
    areas, shared_areas, shared_tokens = np.zeros((3, len(targets), len(ends)))
    first = seconds[:, 0]
    for t, target in enumerate(targets.tolist()):
        flexible = first > target
        row = np.where(flexible, 0.0, first)
        chosen = np.flatnonzero(flexible)
        row[chosen] = columns_for(shares.rows(chosen), target, frame.longest_share)[1]
        for sums, part in ((areas, row), (shared_areas, row * flexible), (shared_tokens, lengths * flexible)):
            sums[t] = np.concatenate([[0.0], np.cumsum(part)])[ends]
    return _Table(ends, tokens[ends], areas, shared_areas, shared_tokens, targets, alone[ends])


def _segments(table: _Table, frame: Frame, fill: float) -> Floats:
    """[P + 1, P + 1] seconds of a round from one boundary to another; infinite where none can be."""
    size = len(table.ends)
    found = np.full((size, size), np.inf)
    ranks, room = frame.num_ranks, fill * frame.cap

    def between(sums: Floats) -> Floats:
        return np.asarray(sums[None, :] - sums[:, None])

    held = between(table.tokens)
    for t, target in reversed(list(enumerate(table.targets.tolist()))):
        seconds = np.maximum(between(table.areas[t]) / ranks, table.alone[:, None])
        # Ranks that long sequences keep busy hold little else: what they leave must hold the others.
        left = ranks - between(table.shared_areas[t]) / np.maximum(seconds, 1e-12)
        fits = (seconds <= target) & (held - between(table.shared_tokens[t]) <= left * room)
        found = np.where(fits, np.minimum(seconds, found), found)
    found[held > ranks * room] = np.inf
    found[np.tril_indices(size)] = np.inf
    return found


def _by_length(
    table: _Table, segments: Floats, order: Ints, counts: range, launch_s: float, stages: int
) -> Iterator[Division]:
    """The best division of each number of rounds."""
    finite = segments[np.isfinite(segments)]
    if not len(finite):
        return
    bounds = [np.inf] if stages == 1 else np.geomspace(float(finite.min()), float(finite.max()), 16).tolist()
    best: dict[int, tuple[float, list[int]]] = {}
    for bound in bounds:
        allowed = np.where(segments <= bound, segments, np.inf)
        cost, back = allowed[0], [np.zeros(len(table.ends), dtype=np.int64)]
        for count in range(1, counts.stop):
            if count > 1:
                total = cost[:, None] + allowed
                back.append(total.argmin(axis=0))
                cost = total.min(axis=0)
            if count not in counts or not np.isfinite(cost[-1]):
                continue
            cuts = [len(table.ends) - 1]
            for row in back[:0:-1]:
                cuts.append(int(row[cuts[-1]]))
            cuts = [0, *cuts[::-1]]
            longest = max(float(segments[a, b]) for a, b in pairwise(cuts))
            seconds = float(cost[-1]) + (stages - 1) * longest + (count + stages - 1) * launch_s
            if count not in best or seconds < best[count][0]:
                best[count] = (seconds, cuts)
    for seconds, cuts in best.values():
        ends = table.ends[cuts]
        yield Division([order[a:b] for a, b in pairwise(ends.tolist())], seconds)


def _mixed(lengths: Ints, shares: Shares, frame: Frame, count: int, launch_s: float, stages: int) -> Iterator[Division]:
    """Rounds that are alike but for their size: the first takes longer, and has all sequences that would need more
    than a node in the others."""
    if count == 1:
        yield Division([np.arange(len(lengths))], target_of(shares, frame, 1.0) + stages * launch_s)
        return
    seconds = np.where(shares.tokens <= frame.longest_share, shares.seconds, np.inf)
    area = (seconds * shares.degrees).min(axis=1)
    in_node = seconds[:, shares.degrees <= frame.node].min(axis=1)
    total_s = float(area.sum()) / frame.num_ranks
    known: set[bytes] = set()
    for tilt in _TILTS:
        first_s = total_s * tilt / count
        other_s = (total_s - first_s) / (count - 1)
        if other_s <= 0:
            break
        tied = in_node > other_s if tilt > 1 else np.zeros(len(lengths), dtype=bool)
        capacity = np.full((2, count), other_s * frame.num_ranks)
        capacity[0, 0], capacity[1] = first_s * frame.num_ranks, frame.num_ranks * frame.cap
        base = np.zeros((2, count))
        base[:, 0] = area[tied].sum(), lengths[tied].sum()
        bins = np.zeros(len(lengths), dtype=np.int64)
        free = np.flatnonzero(~tied)
        bins[free] = level(np.array([area[free], lengths[free]]), capacity, base)
        held = np.bincount(bins, lengths, count)
        if held.max() > frame.num_ranks * frame.cap or bins.tobytes() in known:
            continue
        known.add(bins.tobytes())
        rounds: list[Ints] = [np.flatnonzero(bins == b) for b in np.unique(bins).tolist()]
        times = [target_of(shares.rows(r), frame, 1.0) for r in rounds]
        yield Division(rounds, sum(times) + (stages - 1) * max(times) + (len(rounds) + stages - 1) * launch_s)
