"""What a person sees: progress on stderr while ranks work, one table at the end on stdout, or one JSON object."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from ...core.errors import shorten
from ...core.input.format import percent, to_json
from ...core.verbs import tables_of

Result = dict[str, Any]
Cell = Callable[[Any], Any]
"""What a column shows of a row."""
Columns = Mapping[str, Cell]
"""Cells by the head of their column."""
MOST_FAULTS = 8
"""Of a table of what is wrong; --json has all."""

_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""
_SHORT = 16
"""Characters of a cell that is not parted, if it can be helped."""
_GAP = 2
_MOST_TEXT = 1 << 17
"""Characters of a cell or a caption: the reasons why combinations of a sweep are impossible."""


@contextmanager
def stdout_aside() -> Iterator[None]:
    """Whatever is printed inside goes to stderr, by trainers' loggers and children too: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def emit(data: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print the result: one JSON object and nothing else, or the table."""
    if as_json:
        print(to_json(data))
    else:
        console = Console()
        (console if console.is_terminal else Console(width=_WIDTH)).print(table(data))


class Fitting(Table):
    """A table that leaves columns out where its words and numbers would not fit the terminal, and breaks none if they
    do."""

    spare: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spare = list(self.spare)
        while (left := options.max_width + _GAP - sum(_GAP + _needed(column) for column in self.columns)) < 0 and spare:
            name = spare.pop(0)
            self.columns = [column for column in self.columns if str(column.header) != name]
        for column in self.columns if left >= 0 else ():
            wanted = max(cell_len(str(text)) for text in (column.header, *column.cells)) - _needed(column)
            column.width = _needed(column) + min(left, wanted)
            left -= min(left, wanted)
        return super().__rich_console__(console, options)


def _needed(column: Column) -> int:
    """Characters without which a word of a column would be broken, or a number parted from its unit."""
    words = [word for text in (column.header, *column.cells) for word in str(text).split()]
    short = [str(text) for text in column.cells if cell_len(str(text)) <= _SHORT]
    return max(map(cell_len, (*words, *short)), default=0)


def grid(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    caption: str = "",
    bold: int | None = None,
    spare: Sequence[str] = (),
) -> Table:
    """A plain table: the first column left, numbers right, floats to four digits; ``bold``: the row to set so,
    ``spare``: columns that a narrow terminal does not show, the first to go first."""
    below = plain(caption, "table.caption") if caption else None
    table = Fitting(
        title=plain(title, "table.title"),
        caption=below,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.spare = tuple(spare)
    for place, name in enumerate(head):
        # Keys without spaces are folded, as an ellipsis would hide their ends.
        table.add_column(plain(name), justify="left" if place == 0 else "right", overflow="fold")
    for place, row in enumerate(rows):
        table.add_row(*(_cell(value) for value in row), style="bold" if place == bold else None)
    return table


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return plain(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    return plain("-" if value is None else str(value))


def plain(text: str, style: str = "") -> Text:
    """Text as it stands: what looks like markup in a user's names is no markup, what steers a terminal is escaped."""
    return Text(shorten(text, _MOST_TEXT), style)


def column(key: str, show: Cell = lambda value: value) -> Cell:
    return lambda row: show(row[key])


def by_columns(
    title: str, columns: Columns, rows: Iterable[Any], caption: str = "", *, spare: Sequence[str] = ()
) -> Table:
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return grid(title, list(columns), cells, caption, spare=spare)


def of_plugins(verb: str, result: Result) -> list[Table]:
    """What plugins show of a result."""
    return [grid(*table) for table in tables_of(verb, result)]


def error(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"


def errors(by_name: dict[str, float]) -> str:
    return ", ".join(f"{percent(error)} ({name})" for name, error in by_name.items())


def machine(result: Result) -> str:
    host = result["host"]
    return ", ".join(str(host[key]) for key in ("trainer", "layout", "dtype", "attention", "device") if key in host)
