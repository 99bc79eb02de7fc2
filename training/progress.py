"""How far work is while it goes on: whoever asks for the work may give a callable that is told."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None, str], object]
"""Takes a task's name, its steps done, how many there are (None: nobody knows), and how the last one was, in words."""


def silent(task: str, done: int, total: int | None, text: str) -> None:
    """A `Progress` that shows nothing to anybody."""
