"""A grid of programs, a row for each rank of each stage and a column for each pass of equal length.

         0  1  2  3  4  5
stage 0  F0 F1 F2    B0 F3
stage 1     F0 F1[B1]            [..]: waits for ever
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEGEND = (
    "F forward, f forward for keys and values alone, R forward again, B backward, W weight gradients, "
    "each with its micro-batch; - a dummy; [..] waits for ever"
)


class GridRow(NamedTuple):
    """The cells of one rank at one stage."""

    label: str
    cells: Sequence[tuple[int, str]]
    """Column and text, in order; no two in one column."""
    broken: tuple[int, str] | None = None
    """The cell that can never run."""


def render(rows: Sequence[GridRow], first: int, columns: int) -> str:
    """Lines of text: so many columns from ``first`` on."""
    shown = range(first, first + columns)
    width = 2 + max((len(text) for row in rows for _, text in row.cells), default=2)
    width = max(width, 2 + max((len(row.broken[1]) for row in rows if row.broken), default=2), 1 + len(str(shown[-1])))
    head = max(len(row.label) for row in rows) + 1
    lines = [" " * head + "".join(f" {number}".ljust(width) for number in shown)]
    for row in rows:
        texts = {column: f" {text}" for column, text in row.cells}
        if row.broken:
            texts[row.broken[0]] = f"[{row.broken[1]}]"
        lines.append(row.label.ljust(head) + "".join(texts.get(column, "").ljust(width) for column in shown))
    return "\n".join(line.rstrip() for line in lines)
