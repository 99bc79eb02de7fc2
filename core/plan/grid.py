"""A grid of programs, a row for each rank of each stage and a column for each pass of equal length.

         0  1  2  3  4  5
stage 0  F0 F1 F2    B0 F3
stage 1     F0 F1[B1]            [..]: waits for ever
"""

from __future__ import annotations

from collections.abc import Mapping

LEGEND = (
    "F forward, f forward for keys and values alone, R forward again, B backward, W weight gradients, "
    "each with its micro-batch; - a dummy; [..] waits for ever"
)


def render(rows: Mapping[str, Mapping[int, str]], first: int, columns: int) -> str:
    """Lines of text: so many columns from ``first`` on.

    ``rows``: by its label each row's cells by column, following a blank or, where one can never run, in brackets.
    """
    shown = range(first, first + columns)
    texts = [text for cells in rows.values() for text in cells.values()]
    width = max([4, 1 + len(str(shown[-1])), *(len(text) + text.startswith(" ") for text in texts)])
    head = max(map(len, rows)) + 1
    lines = [" " * head + "".join(f" {number}".ljust(width) for number in shown)]
    for label, cells in rows.items():
        lines.append(label.ljust(head) + "".join(cells.get(column, "").ljust(width) for column in shown))
    return "\n".join(line.rstrip() for line in lines)
