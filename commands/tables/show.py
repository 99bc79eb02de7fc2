"""What a person sees: progress on stderr while ranks work, one table at the end on stdout, or one JSON object."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.errors import shorten
from ...core.input.format import percent, to_json

Result = dict[str, Any]
Cell = Callable[[Any], Any]
"""What a column shows of a row."""
Columns = Mapping[str, Cell]
"""Cells by the head of their column."""
MOST_FAULTS = 8
"""Of a table of what is wrong; --json has all."""

_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""
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


def grid(
    title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", bold: int | None = None
) -> Table:
    """A plain table: the first column left, numbers right, floats to four digits; ``bold``: the row to set so."""
    below = plain(caption, "table.caption") if caption else None
    table = Table(title=plain(title, "table.title"), caption=below, title_justify="left", caption_justify="left")
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


def by_columns(title: str, columns: Columns, rows: Iterable[Any], caption: str = "", bold: int | None = None) -> Table:
    return grid(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], caption, bold)


def errors(by_name: dict[str, float]) -> str:
    return ", ".join(f"{percent(error)} ({name})" for name, error in by_name.items())


def machine(result: Result) -> str:
    host = result["host"]
    return ", ".join(str(host[key]) for key in ("trainer", "layout", "dtype", "attention", "device") if key in host)
