"""Rows that begin alike, laid out so that what they share is there once: a trie, its segments depth first.

    rows      a b c d e        segments    0: a b c        parents   -1
              a b c f g                    1:       d e               0
              x y                          2:       f g               0
                                           3: x y                    -1

A segment continues its parent, and all that continue it, at any depth, lie right after it. So whatever reads a trunk
is one range of slots (Tree Training, arXiv 2511.00413, section 3, calls it depth-first serialization).

Shape legend: R = rows, L = tokens of a row, N = slots of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .step_plan import Slice

WORTH = 16
"""A trunk is shared where the tokens that this saves are at least one in so many of those that read it: a block of
attention for each of them costs more than the rest of the model for a few tokens."""

Row = npt.NDArray[Any]
"""What tells tokens apart, integers [L] or [L, K]: equal rows of it are the same token as long as those before are."""


class Branching(NamedTuple):
    """How the segments of a pack continue each other, depth first."""

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    parents: tuple[int, ...]
    """The segment that each continues; -1: it begins a sequence."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Branching | None:
        """The segments of slices that continue each other as lines of code do: each the nearest one before it that
        begins earlier in its sequence, which is its own up to there. None: some slice has nothing to continue."""
        open_: list[int] = []
        forks = [{s.start, s.stop} for s in slices]
        continued: list[int] = []
        for number, s in enumerate(slices):
            while open_ and slices[open_[-1]].start >= s.start:
                open_.pop()
            continued.append(open_[-1] if s.start and open_ else -1)
            if s.start and (not open_ or slices[open_[-1]].stop < s.start):
                return None
            if s.start:
                forks[open_[-1]].add(s.start)
            open_.append(number)
        lengths: list[int] = []
        parents: list[int] = []
        ending: dict[tuple[int, int], int] = {}
        for number, places in enumerate(forks):
            parent = ending[continued[number], slices[number].start] if continued[number] >= 0 else -1
            for first, end in pairwise(sorted(places)):
                parents.append(parent)
                lengths.append(end - first)
                parent = ending[number, end] = len(lengths) - 1
        return cls(tuple(lengths), tuple(parents))

    @property
    def starts(self) -> tuple[int, ...]:
        """The place of each segment's first token in its sequence."""
        starts: list[int] = []
        for parent in self.parents:
            starts.append(0 if parent < 0 else starts[parent] + self.lengths[parent])
        return tuple(starts)

    @property
    def ranges(self) -> tuple[slice, ...]:
        """The slots of each segment."""
        return tuple(slice(*borders) for borders in pairwise(accumulate(self.lengths, initial=0)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(sum, zip(self.starts, self.lengths, strict=True)), default=0)

    @property
    def ends(self) -> tuple[int, ...]:
        """The slot after the last token that continues each segment, its own among them."""
        ends = [one.stop for one in self.ranges]
        for number in range(len(ends) - 1, -1, -1):
            if (parent := self.parents[number]) >= 0:
                ends[parent] = max(ends[parent], ends[number])
        return tuple(ends)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that causal attention computes."""
        own = zip(self.starts, self.lengths, strict=True)
        return sum(length * start + length * (length + 1) // 2 for start, length in own)

    def path(self, segment: int) -> tuple[int, ...]:
        """The segments of a sequence up to one of them, from its first."""
        segments = [segment]
        while (parent := self.parents[segments[-1]]) >= 0:
            segments.append(parent)
        return tuple(reversed(segments))


class Trie(NamedTuple):
    """Where the tokens of rows are once what they share is there once."""

    branching: Branching
    slots: tuple[npt.NDArray[np.int64], ...]
    """Of each row, the slot of every token [L]."""

    @property
    def num_tokens(self) -> int:
        """How many slots all segments have."""
        return sum(self.branching.lengths)

    @property
    def is_shared(self) -> bool:
        """Whether any token is in several rows."""
        return self.num_tokens < sum(map(len, self.slots))

    @property
    def sources(self) -> npt.NDArray[np.int64]:
        """int64 [N]; of all tokens of all rows one after another, one that is in each slot."""
        every = np.concatenate(self.slots)
        first = np.empty(self.num_tokens, dtype=np.int64)
        first[every[::-1]] = np.arange(len(every))[::-1]
        return first


def trie_of(rows: Sequence[Row], worth: int = WORTH) -> Trie:
    """The trie of some rows.

    Args:
        worth: see `WORTH`; 0: every trunk is shared, of one token, too.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    # Tokens that each row of this order has in common with the one before it.
    alike = [0, *(_alike(rows[one], rows[other]) for one, other in pairwise(order))]
    slots = tuple(np.empty(len(row), dtype=np.int64) for row in rows)
    lengths: list[int] = []
    parents: list[int] = []
    size = 0
    left = [(0, len(rows), 0, -1)] if len(rows) else []
    while left:
        first, end, depth, parent = left.pop()
        own = order[first:end]
        fork = min(alike[first + 1 : end], default=len(rows[own[0]]))
        borders = [first, *(place for place in range(first + 1, end) if alike[place] == fork), end]
        saved, readers = (fork - depth) * (len(borders) - 2), sum(len(rows[row]) - fork for row in own)
        if fork > depth and (len(own) == 1 or not worth or saved * worth >= readers):
            for row in own:
                slots[row][depth:fork] = np.arange(size, size + fork - depth)
            lengths.append(fork - depth)
            parents.append(parent)
            size, depth, parent = size + fork - depth, fork, len(parents) - 1
        if len(own) > 1:
            left += [(*of_branch, depth, parent) for of_branch in pairwise(borders)][::-1]
    return Trie(Branching(tuple(lengths), tuple(parents)), slots)


def _alike(one: Row, other: Row) -> int:
    """Tokens that two rows have in common before they differ."""
    size = min(len(one), len(other))
    unlike = (one[:size] != other[:size]).reshape(size, -1).any(1)
    return int(unlike.argmax()) if unlike.any() else size
