"""The validations of a run of `train`, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ...core.input.format import seconds
from .show import grid

_MOST_ROWS = 12
"""Shown of a run: the first, the lowest, and the last ones; --json has all."""


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """One, or none of a run that validated nothing."""
    if not rows:
        return []
    lowest = max((i for i, row in enumerate(rows) if row["best"]), default=0)
    shown = sorted({0, lowest, *range(max(0, len(rows) - _MOST_ROWS + 2), len(rows))})
    head = ("steps before", "loss", "perplexity", "tokens/s", "took")
    cells = [_cells(rows[i]) for i in shown]
    last = rows[-1]
    caption = f"{last['sequences']:,} sequences, {last['targets']:,} targets each time"
    if last["without_target"]:
        caption += f"; {last['without_target']:,} samples without a target are left out"
    if len(shown) < len(rows):
        caption += f"\n{len(shown)} of {len(rows)} validations; --json has all"
    return [grid("validation", head, cells, caption, bold=shown.index(lowest))]


def _cells(row: dict[str, Any]) -> list[Any]:
    rate = row["tokens"] / row["validation_s"]
    return [row["step"], f"{row['loss']:.4f}", row["perplexity"], rate, seconds(row["validation_s"])]
