"""Where the samples of a script's own batch lie, as well as can be known, for `evenload audit`.

Asked in this order, the first that answers: the samples that the batch was collated of; ``cu_seq_lens_q``; positions
that start again; an attention mask that numbers its samples. A token that the user names ends a sample in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class SampleSpan(NamedTuple):
    """A sample of a batch: tokens [start, stop) of a row."""

    row: int
    start: int
    stop: int


def spans(
    tokens_BT: Tensor,
    mask_BT: Tensor | None,
    positions_BT: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Sequence[int],
    border: int | None = None,
) -> list[SampleSpan]:
    """The samples of a batch, row by row.

    Args:
        mask_BT: 0 on padding.
        lengths: tokens of the samples that the batch was collated of, in order; empty: not known.
        border: the token that ends a sample; None: no token does by itself.
    """
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask_BT is None else mask_BT > 0
    rows = [_ends(row_T) for row_T in real_BT]
    cuts = _of_lengths(rows, lengths)
    if cuts is None and cu_seqlens is not None and len(rows) == 1:
        cuts = [sorted({*rows[0], *(int(one) for one in cu_seqlens.flatten() if rows[0][0] <= one <= rows[0][1])})]
    if cuts is None:
        cuts = [
            [start, *_restarts(positions_BT, mask_BT, row, start, stop), stop] for row, (start, stop) in enumerate(rows)
        ]
    return [span for row, of_row in enumerate(cuts) for span in _cut(tokens_BT[row], row, of_row, border)]


def _ends(real_T: Tensor) -> tuple[int, int]:
    places = real_T.nonzero().flatten()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _of_lengths(rows: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[list[int]] | None:
    """Borders by row where samples of these lengths fill the rows, or each is a row of its own."""
    if len(lengths) == len(rows):
        return [[start, min(stop, start + length)] for (start, stop), length in zip(rows, lengths, strict=True)]
    cuts, left = [], list(lengths)
    for start, stop in rows:
        of_row = [start]
        while left and of_row[-1] + left[0] <= stop:
            of_row.append(of_row[-1] + left.pop(0))
        cuts.append(of_row)
    whole = all(of_row[-1] == stop for of_row, (_, stop) in zip(cuts, rows, strict=True))
    return cuts if lengths and not left and whole else None


def _restarts(positions_BT: Tensor | None, mask_BT: Tensor | None, row: int, start: int, stop: int) -> list[int]:
    if positions_BT is not None:
        starts_T = positions_BT[row, start + 1 : stop] == 0
    elif mask_BT is not None:
        starts_T = mask_BT[row, start : stop - 1] != mask_BT[row, start + 1 : stop]
    else:
        return []
    return [int(place) + start + 1 for place in starts_T.nonzero().flatten()]


def _cut(tokens_T: Tensor, row: int, borders: Sequence[int], border: int | None) -> Iterator[SampleSpan]:
    for start, stop in pairwise(borders):
        ends = [] if border is None else (tokens_T[start : stop - 1] == border).nonzero().flatten().tolist()
        yield from (
            SampleSpan(row, a, b) for a, b in pairwise([start, *(start + end + 1 for end in ends), stop]) if a < b
        )
