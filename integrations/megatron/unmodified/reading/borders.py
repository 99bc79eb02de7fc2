"""Where samples lie in the rows of a batch, by the borders that come with them.

Where there are two lists of borders, the padded one says where samples lie in their row, and the other how long they
are without the padding after each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....core.errors import EvenloadError

_BORDERS = (
    ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"),
    ("cu_seqlens_q", ""),
)
"""Where samples lie in their row, and how long they are there: the first pair whose first key a batch has goes."""

COUNTS = {"cu_seqlens_argmin": "cu_seqlens", "cu_seqlens_unpadded_argmin": "cu_seqlens_unpadded"}
"""Keys that say how many borders of another one count."""


class Run(NamedTuple):
    """Where a sample lies in a batch."""

    row: int
    start: int
    length: int
    """Without the padding after it."""


def runs_of(batch: Mapping[str, Any]) -> list[Run]:
    """Where the samples of a batch lie, row by row. Raises EvenloadError for borders that do not divide its rows."""
    rows, width = batch["tokens"].shape
    where, inside = next(((w, i) for w, i in _BORDERS if batch.get(w) is not None), ("", ""))
    if not where:
        return [Run(row, 0, width) for row in range(rows)]
    runs = []
    lengths = _borders(batch, inside) if batch.get(inside) is not None else None
    for row, borders in enumerate(_borders(batch, where)):
        _refuse_odd(borders, where, row, width)
        slots = [(a, b - a) for a, b in pairwise(borders)]
        true = [n for _, n in slots] if lengths is None else _differences(lengths[row], inside, row)
        if len(true) != len(slots) or any(n > size for n, (_, size) in zip(true, slots, strict=True)):
            raise EvenloadError(
                f"{inside} says that samples are longer than their places in {where}",
                f"row {row}: {inside} {lengths and lengths[row]}, {where} {borders}",
                "mend the dataset: both have one entry for each border, and no sample is longer than its place",
            )
        runs += [Run(row, start, n) for n, (start, size) in zip(true, slots, strict=True) if size]
    _refuse_lost(batch, runs, where)
    return runs


def _borders(batch: Mapping[str, Any], key: str) -> list[list[int]]:
    """The borders of each row of a batch, as far as they count."""
    value, (rows, _) = batch[key], batch["tokens"].shape
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    tensor = tensor[None] if tensor.dim() == 1 else tensor
    if tensor.dim() != 2 or len(tensor) != rows or tensor.is_floating_point():
        raise EvenloadError(
            f"{key} has not a row of borders for each row of tokens",
            f"{key} {tuple(tensor.shape)} {tensor.dtype}, tokens {tuple(batch['tokens'].shape)}",
            f"give {key} as integers [b, n], or [n] with one row",
        )
    kept = [list(takewhile(lambda border: border >= 0, row)) for row in tensor.tolist()]
    count = next((batch.get(name) for name, of in COUNTS.items() if of == key), None)
    if count is not None and (counts := torch.as_tensor(count).flatten().tolist()) != [len(one) for one in kept]:
        raise EvenloadError(
            f"{key} is not filled up with -1 from the place on that the batch names",
            f"{counts} entries are to count, {[len(one) for one in kept]} are not negative",
            "mend the dataset",
        )
    return kept


def _differences(borders: list[int], key: str, row: int) -> list[int]:
    lengths = [b - a for a, b in pairwise(borders)]
    if any(n < 0 for n in lengths):
        raise EvenloadError(f"{key} descends", f"row {row}: {borders}", "mend the dataset: borders ascend")
    return lengths


def _refuse_odd(borders: list[int], key: str, row: int, width: int) -> None:
    """Raise unless borders run from 0 to the end of their row."""
    _differences(borders, key, row)
    if not borders or borders[0] != 0 or borders[-1] != width:
        crosses = bool(borders) and borders[-1] > width
        raise EvenloadError(
            f"{key} names samples beyond its row" if crosses else f"{key} does not cover its row",
            f"row {row} of {width} tokens: {borders}",
            "keep each sample in one row, with borders that begin at 0 in each"
            if crosses
            else "give borders from 0 to the end of the row; padding belongs to the last sample",
        )


def _refuse_lost(batch: Mapping[str, Any], runs: Iterable[Run], key: str) -> None:
    """Raise where a token with loss lies in the padding after a sample: no kernel computes it."""
    inside = torch.zeros(batch["loss_mask"].shape, dtype=torch.bool)
    for run in runs:
        inside[run.row, run.start : run.start + run.length] = True
    if lost := int((~inside & (batch["loss_mask"].cpu() != 0)).sum()):
        raise EvenloadError(
            "tokens with loss lie in the padding between samples",
            f"{lost} tokens of a batch with {key}",
            "set their loss_mask to 0, or count them to their sample",
        )
