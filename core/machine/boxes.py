"""What replicas of unlike shapes exchange so that each has the sum over all of them: boxes of parameters.

A rank holds ranges of a parameter along one of its dimensions. Where the ranges of any rank of any replica end, all are
cut; what lies between two cuts is a box, which each replica holds whole on one of its ranks or on several (data
parallelism, norms under tensor parallelism, a tied embedding). One of those, the box's owner in its replica, exchanges
it: each value goes to each other replica once, every owner adds up in the order of the replicas, so all have the same
bits, and tells the other holders of its own replica. A box that several ranks hold is divided among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ..errors import EvenloadError


class HeldPart(NamedTuple):
    """What a rank holds of a parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter; rows that no token has are left out."""
    dim: int
    """Along which it is cut."""
    ranges: tuple[tuple[int, int], ...]
    """Along that dimension of the whole parameter, ascending, as they follow each other on the rank."""

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of the parameter."""
        return self.ranges == ((0, self.shape[self.dim]),)

    def place_of(self, start: int) -> int:
        """Where on the rank a box that starts there begins, along the dimension."""
        place = bisect_right(self.ranges, (start, self.shape[self.dim])) - 1
        return sum(stop - first for first, stop in self.ranges[:place]) + start - self.ranges[place][0]


@dataclass(frozen=True, eq=False)
class Box:
    """Values that are exchanged together: of a parameter, from ``start`` up to ``stop`` along a dimension."""

    name: str
    dim: int
    start: int
    stop: int
    values: int
    owners: tuple[int, ...]
    """The rank of the job that exchanges it, of each replica."""
    holders: tuple[tuple[int, ...], ...]
    """The ranks of the job that hold it, of each replica."""


HeldParts = Mapping[str, HeldPart]
"""What a rank holds, by the parameters' names."""


def boxes_of(replicas: Sequence[Mapping[int, HeldParts]], most: int) -> list[Box]:
    """The boxes of all parameters, none of more than about ``most`` values, in an order that is the same on all ranks.

    ``replicas``: of each, by its ranks in the job, what they hold. Raises EvenloadError where a replica lacks a part of
    a parameter that another one has.
    """
    names = sorted({name for replica in replicas for parts in replica.values() for name in parts})
    loads, boxes = Counter[int](), list[Box]()
    for name in names:
        held = [{rank: parts[name] for rank, parts in replica.items() if name in parts} for replica in replicas]
        for start, stop, dim, of_one, holders in _cuts(name, held):
            divided = max(map(len, holders), default=1)
            each = max(1, min(-(-(stop - start) // divided), most // of_one))
            for first in range(start, stop, each):
                last = min(stop, first + each)
                values = (last - first) * of_one
                owners = tuple(min(ranks, key=lambda rank: (loads[rank], rank)) for ranks in holders)
                loads.update(dict.fromkeys(owners, values))
                boxes.append(Box(name, dim, first, last, values, owners, holders))
    return boxes


def _cuts(
    name: str, held: Sequence[Mapping[int, HeldPart]]
) -> Iterator[tuple[int, int, int, int, tuple[tuple[int, ...], ...]]]:
    """(start, stop, dimension, values of one index, ranks that hold it by replica) of what lies between two cuts."""
    parts = [part for replica in held for part in replica.values()]
    dim = next((part.dim for part in parts if not part.is_whole), parts[0].dim)
    size = parts[0].shape[dim]
    ranges = [
        {rank: ((0, size),) if part.is_whole else part.ranges for rank, part in replica.items()} for replica in held
    ]
    ends = sorted({end for replica in ranges for own in replica.values() for one in own for end in one})
    for start, stop in pairwise(ends):
        holders = tuple(
            tuple(rank for rank, own in replica.items() if any(a <= start < b for a, b in own)) for replica in ranges
        )
        if not all(holders):
            lacking = next(number for number, ranks in enumerate(holders) if not ranks)
            what, do = "replicas hold different parameters", "give all replicas the same model"
            raise EvenloadError(what, f"replica {lacking} has no {name} [{start}:{stop}]", do)
        yield start, stop, dim, prod(parts[0].shape) // size, holders


def bundles_of(boxes: Sequence[Box], most: int) -> list[list[Box]]:
    """The boxes in the order given, in bundles of at most ``most`` values, or of one box. In each, a rank sends one
    message to another one at most."""
    bundles, ends = list[list[Box]](), 0
    for box, total in zip(boxes, accumulate(box.values for box in boxes), strict=True):
        if not bundles or total > ends + most:
            bundles.append([])
            ends = total - box.values
        bundles[-1].append(box)
    return bundles
