"""What a person sees: progress on stderr while ranks work, one table at the end on stdout, or one JSON object."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from ...core.errors import shorten
from ...core.input.json_text import to_json
from ...core.plan.limits import GIB

_QUIET_EVERY_S = 15.0
"""Without a terminal, a line this often takes the bar's place."""

_MOST_TEXT = 1 << 17
"""Characters of a cell or a caption: the reasons why combinations of a sweep are impossible."""

_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


class Tick(Protocol):
    """A step of a task is done, or so many; ``text`` stands behind its bar."""

    def __call__(self, text: str, advance: int = 1) -> None: ...


class Progress:
    """One bar per task on a terminal, a line now and then elsewhere, nothing on ranks that do not report."""

    def __init__(self, bar: RichProgress, lines: Console | None) -> None:
        self._bar, self._lines = bar, lines

    @contextmanager
    def task(self, name: str, total: int | None) -> Iterator[Tick]:
        """Yields ``tick(text)``, to be called once per step; ``total`` is None where nobody knows it before."""
        bar, console = self._bar, self._lines
        if console is None:
            task = bar.add_task(name, total=total, text="")
            yield lambda text, advance=1: bar.update(task, advance=advance, text=shorten(text))
            return
        started = said = time.monotonic()
        done = 0

        def tick(text: str, advance: int = 1) -> None:
            nonlocal said, done
            done, now = done + advance, time.monotonic()
            if advance and (now - said > _QUIET_EVERY_S or done == total):
                said = now
                left = f", {clock((now - started) / done * (total - done))} left" if total and done < total else ""
                console.print(plain(f"{name}: {done}/{total or '?'}{left}  {text}"), highlight=False)

        yield tick


@contextmanager
def progress(leads: bool) -> Iterator[Progress]:
    """Progress for this rank."""
    console = Console(stderr=True)
    name, text = (TextColumn(f"{{task.{key}}}", markup=False) for key in ("description", "fields[text]"))
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with RichProgress(*columns, console=console, disable=not (leads and console.is_terminal)) as bar:
        yield Progress(bar, console if leads and not console.is_terminal else None)


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


def plain(text: str, style: str = "") -> Text:
    """Text as it stands: what looks like markup in a user's names is no markup, what steers a terminal is escaped."""
    return Text(shorten(text, _MOST_TEXT), style)


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return plain(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    return plain("-" if value is None else str(value))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 100 else f"{size:.3g} GiB" if size >= 1 else f"{1024 * size:.0f} MiB"


def mib(num_bytes: float) -> str:
    """Of what may be small."""
    return f"{1024 * num_bytes / GIB:,.3g} MiB"


def clock(value_s: float) -> str:
    """Seconds as hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(value_s)))


def seconds(value: float) -> str:
    """Seconds with a unit that fits."""
    if value >= 1:
        return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"
