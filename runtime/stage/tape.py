"""Inputs of a pipeline stage, kept by (sequence, token range) for passes that will be run a second time.

A replayed backward may group and cut its tokens in another way than the forward did, so its input is gathered token by
token from what the forward received. The first stage needs no tape: it has the token ids.

Shape legend: T = slots of a pack, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import Slice


class Tape:
    """One per step and stage. Backward slices of a sequence descend, so what was gathered is freed from the end."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Slice, Tensor]]] = {}

    def write(self, slices: Sequence[Slice], segments: Sequence[int], input_TC: Tensor) -> None:
        """Keep the real tokens of a pack. ``segments`` are the borders of its slices, padding included."""
        for piece, first in zip(slices, segments, strict=False):
            rows = input_TC[first : first + piece.length]
            # Slices of one pack are freed at different times; a view would hold all of them until the last.
            self._kept.setdefault(piece.sequence, []).append((piece, rows if len(slices) == 1 else rows.clone()))

    def gather(self, slices: Sequence[Slice], segments: Sequence[int], like_TC: Tensor, *, free: bool = True) -> Tensor:
        """The input of a pack: ``like_TC`` filled in, zeros on padding. ``free``: this is for a backward; drop what no
        later one will ask for."""
        like_TC.zero_()
        first_of: dict[int, int] = {}
        for piece, (first, _) in zip(slices, pairwise(segments), strict=False):
            first_of[piece.sequence] = min(piece.start, first_of.get(piece.sequence, piece.start))
            kept = self._kept.get(piece.sequence, [])
            filled = 0
            for have, rows in kept:
                start, stop = max(have.start, piece.start), min(have.stop, piece.stop)
                if start < stop:
                    place = first + start - piece.start
                    like_TC[place : place + stop - start] = rows[start - have.start : stop - have.start]
                    filled += stop - start
            assert filled == piece.length, f"{filled} of {piece.length} tokens of {piece} are on the tape"
        for sequence, start in first_of.items() if free else ():  # a share of a slice is in several pieces
            self._kept[sequence] = [(have, rows) for have, rows in self._kept[sequence] if have.start < start]
            if not self._kept[sequence]:
                del self._kept[sequence]
        return like_TC

    def check_empty(self) -> None:
        """Raise EvenloadError if a stage input was kept that no backward asked for."""
        if self._kept:
            sequence = min(self._kept)
            raise EvenloadError(
                "stage inputs are left over at the end of the step",
                f"{len(self._kept)} sequences, the first is {sequence}",
                "this is a fault of evenload's schedule; please report it with the plan (evenload plan --out)",
            )
