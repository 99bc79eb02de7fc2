"""Progress of long work on stderr: one bar a task on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...core.errors import shorten
from ...core.input.format import clock
from ...training.progress import Progress as Callback
from .show import plain

_QUIET_EVERY_S = 15.0
"""Without a terminal, a line this often takes the bar's place."""


@contextmanager
def progress_shown() -> Iterator[Callback]:
    """Shows all that it is told; nothing is drawn before."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    name, text = (TextColumn(f"{{task.{key}}}", markup=False) for key in ("description", "fields[text]"))
    bars = Progress(name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text, console=console)
    tasks: dict[str, TaskID] = {}

    def show(task: str, done: int, total: int | None, text: str) -> None:
        bars.start()
        if task not in tasks:
            tasks[task] = bars.add_task(task, total=total, text="")
        bars.update(tasks[task], completed=done, total=total, text=shorten(text))

    try:
        yield show
    finally:
        bars.stop()


def _lines(console: Console) -> Callback:
    began_s: dict[str, float] = {}
    said: dict[str, tuple[float, int]] = {}

    def show(task: str, done: int, total: int | None, text: str) -> None:
        now = time.monotonic()
        if task not in said or done < said[task][1]:  # it begins, perhaps once more
            began_s[task], said[task] = now, (now, 0)
        said_s, before = said[task]
        if done != before and (now - said_s > _QUIET_EVERY_S or done == total):
            said[task] = now, done
            left = f", {clock((now - began_s[task]) / done * (total - done))} left" if total and done < total else ""
            console.print(plain(f"{task}: {done}/{total or '?'}{left}  {text}"), highlight=False)

    return show
