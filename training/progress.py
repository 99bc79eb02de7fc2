"""Progress of long work on stderr: one bar a task on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from ..core.errors import shorten
from ..core.input.format import clock

_QUIET_EVERY_S = 15.0
"""Without a terminal, a line this often takes the bar's place."""

_MOST_TEXT = 1 << 17
"""Characters of a cell or a caption: the reasons why combinations of a sweep are impossible."""


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


def plain(text: str, style: str = "") -> Text:
    """Text as it stands: what looks like markup in a user's names is no markup, what steers a terminal is escaped."""
    return Text(shorten(text, _MOST_TEXT), style)
