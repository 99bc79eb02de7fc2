"""Items to bins of unlike capacity so that all bins are equally full, in several weights at once.

Every item k has weights w_dk (seconds forward, seconds backward, ...), every bin b capacities C_db. A bin's fill is

    fill_b = max_d  sum_{k in b} w_dk / C_db                         minimise  max_b fill_b

Largest items first onto the bin that is least full after it (the greedy rule for related machines; Gonzalez, Ibarra and
Sahni, SIAM J. Comput. 1977), then moves and swaps out of the fullest bin, and where these no longer help the fullest
bin and another one are split anew: all 2^12 ways for their largest items, the small ones poured into what is left.
O(K log B) plus a bounded number of polishing moves; deterministic. Not done: optimality, which no figure here assumes.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from ..aliases import Floats, Ints

_EVEN = 1.002
"""Fullest bin over the mean fill at which polishing ends."""
_MOVES_PER_BIN = 3
_REACH = 16
"""Emptiest bins that are weighed against the fullest one at each move,"""
_PAIRS = 12288
"""as long as these are no more pairs of items than this."""
_PARTNERS = 6
"""Bins with which the fullest one is split anew."""
_LARGEST = 12
"""Items of a pair of bins that are split in every way."""
_WAYS: npt.NDArray[np.float64] = ((np.arange(1 << _LARGEST)[:, None] >> np.arange(_LARGEST)) & 1).astype(np.float64)


def level(weights: Floats, capacity: Floats, base: Floats, noise: Floats | float = 0.0) -> Ints:
    """Bin of each item, int64 [K]. weights float64 [D, K], capacity float64 [D, B], all positive.

    ``base`` float64 [D, B] is what the bins hold already. ``noise`` float64 [K] makes items larger by these shares
    where they are put in order, for another start.
    """
    members = _largest_first(weights, capacity, base, noise)
    _Bins(weights, capacity, base, members).polish()
    bins = np.zeros(weights.shape[1], dtype=np.int64)
    for b, items in enumerate(members):
        bins[items] = b
    return bins


def loads(weights: Floats, num_bins: int, bins: Ints) -> Floats:
    """Summed weights of each bin, float64 [D, B]."""
    return np.array([np.bincount(bins, row, num_bins) for row in weights])


def _largest_first(weights: Floats, capacity: Floats, base: Floats, noise: Floats | float) -> list[list[int]]:
    """Large items onto the bin that is least full with them; small ones, which hardly matter, onto the least full."""
    num_bins = capacity.shape[1]
    scaled = weights / capacity.sum(axis=1, keepdims=True)
    share = capacity / capacity.sum(axis=1, keepdims=True)
    load = base / capacity.sum(axis=1, keepdims=True)
    order = np.argsort(-scaled.max(axis=0) * (1 + noise), kind="stable")
    members: list[list[int]] = [[] for _ in range(num_bins)]
    # Exact while an item is a sizeable part of a bin: O(B) each, so at most four of them per bin.
    exact = min(len(order), 4 * num_bins)
    for item in order[:exact].tolist():
        b = int(((load + scaled[:, item, None]) / share).max(axis=0).argmin())
        members[b].append(item)
        load[:, b] += scaled[:, item]
    heap = [(fill, b) for b, fill in enumerate((load / share).max(axis=0).tolist())]
    heapq.heapify(heap)
    size, space = scaled.max(axis=0).tolist(), share.min(axis=0).tolist()
    for item in order[exact:].tolist():
        fill, b = heap[0]
        members[b].append(item)
        heapq.heapreplace(heap, (fill + size[item] / space[b], b))
    return members


class _Bins:
    """Items in bins, moved until the fullest bin is hardly fuller than the mean one."""

    def __init__(self, weights: Floats, capacity: Floats, base: Floats, members: list[list[int]]) -> None:
        self._weights = weights
        self._capacity = capacity
        self._members = members
        sums = [weights[:, items].sum(axis=1) for items in members]
        self._load = base + np.array(sums).reshape(len(members), -1).T

    def polish(self) -> None:
        stuck = np.zeros(len(self._members), dtype=bool)
        for _ in range(_MOVES_PER_BIN * len(self._members)):
            fill = (self._load / self._capacity).max(axis=0)
            full = int(np.where(stuck, -1.0, fill).argmax())
            if stuck[full] or fill[full] <= _EVEN * fill.mean():
                return
            others = [int(b) for b in np.argsort(fill, kind="stable")[: _REACH + 1] if b != full][:_REACH]
            if not self._members[full] or not (
                self._swap(full, others, fill[full]) or self._split_anew(full, others[:_PARTNERS], fill[full])
            ):
                # One heavy item may hold its bin above the others for good; these can still be evened among themselves.
                stuck[full] = True

    def _swap(self, full: int, others: list[int], limit: float) -> bool:
        """Apply the best move or swap between the fullest bin and the others; False if none gets below ``limit``."""
        weights, capacity, load, members = self._weights, self._capacity, self._load, self._members
        out = members[full]
        per_bin = max(1, sum(map(len, members)) // len(members))
        others = others[: max(2, _PAIRS // (len(out) * per_bin))]
        if not others:
            return False
        # A move is a swap against nothing: every other bin offers one item of no weight.
        back = [(b, item) for b in others for item in members[b]]
        owner = np.array([*others, *(b for b, _ in back)])
        offered = np.concatenate(
            [np.zeros((len(weights), len(others))), weights[:, [item for _, item in back]]], axis=1
        )
        shift = weights[:, out][:, :, None] - offered[:, None, :]
        ours = (load[:, full][:, None, None] - shift) / capacity[:, full][:, None, None]
        theirs = (load[:, owner][:, None, :] + shift) / capacity[:, owner][:, None, :]
        after = np.maximum(ours, theirs).max(axis=0)
        row, column = divmod(int(after.argmin()), after.shape[1])
        if after[row, column] >= limit * (1 - 1e-6):
            return False
        other, moved = int(owner[column]), out[row]
        if column >= len(others):
            item = back[column - len(others)][1]
            members[other].remove(item)
            members[full].append(item)
        members[full].remove(moved)
        members[other].append(moved)
        load[:, full] -= shift[:, row, column]
        load[:, other] += shift[:, row, column]
        return True

    def _split_anew(self, full: int, others: list[int], limit: float) -> bool:
        """Split the fullest bin and another one anew; False if that gets below ``limit`` with none of the others."""
        weights, capacity, load, members = self._weights, self._capacity, self._load, self._members
        for other in others:
            items = np.array(sorted(members[full] + members[other]), dtype=np.int64)
            items = items[np.argsort(-weights[:, items].max(axis=0), kind="stable")]
            large, small = items[:_LARGEST], items[_LARGEST:]
            caps = (capacity[:, full, None], capacity[:, other, None])
            choices = _WAYS[: 1 << len(large), : len(large)].T
            there = load[:, [full, other]] - np.stack(
                [weights[:, members[b]].sum(axis=1) for b in (full, other)], axis=1
            )
            first = there[:, :1] + weights[:, large] @ choices
            second = there[:, 1:] + weights[:, large] @ (1 - choices)
            rest = weights[:, small].sum(axis=1, keepdims=True)
            # Small items pour into what is left: the pair cannot get below its common fill, nor below its large items.
            common = ((first + second + rest) / (caps[0] + caps[1])).max(axis=0)
            reached = np.maximum((first / caps[0]).max(axis=0), (second / caps[1]).max(axis=0))
            best = int(np.maximum(common, reached).argmin())
            sums = [first[:, best, None].copy(), second[:, best, None].copy()]
            sides = [large[choices[:, best] == 1].tolist(), large[choices[:, best] == 0].tolist()]
            for item in small.tolist():
                after = [float(((s + weights[:, item, None]) / c).max()) for s, c in zip(sums, caps, strict=True)]
                side = int(after[1] < after[0])
                sums[side] += weights[:, item, None]
                sides[side].append(item)
            if max(float((s / c).max()) for s, c in zip(sums, caps, strict=True)) < limit * (1 - 1e-6):
                members[full], members[other] = sides
                load[:, [full, other]] = np.concatenate(sums, axis=1)
                return True
        return False
