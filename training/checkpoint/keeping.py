"""Which checkpoints a run keeps: those that are due, the last one and, where it validates, the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from ...core.planning.planner import Planned
from ..job import Job
from .background import Background
from .resuming import BEST, keep


class Keep(Protocol):
    """Does what is due after a step. ``state``: gives what a checkpoint keeps of the run; ``best``: the step has the
    lowest validation loss so far. Collective."""

    def __call__(self, step: int, planned: Planned, state: Callable[[], Mapping[str, Any]], *, best: bool) -> None: ...


@contextmanager
def keeping(job: Job) -> Iterator[Keep]:
    """Keeps the checkpoints that the recipe asks for; at the end all are written. Collective."""
    config, steps = job.recipe.checkpoint, job.recipe.train.steps
    in_background = config.background and config.dir is not None
    with Background(job) if in_background else nullcontext() as background:

        def after(step: int, planned: Planned, state: Callable[[], Mapping[str, Any]], *, best: bool) -> None:
            if background:
                background.look()
            done = step + 1
            due = done % config.every == 0 or done == steps
            if config.dir and config.best and best:
                keep(job, config.dir / BEST, step, planned, state(), background, most=1)
            if config.dir and due:
                keep(job, config.dir, step, planned, state(), background)

        yield after
