"""Checkpoints that are written while training goes on: ``checkpoint.background``.

When one is due every rank copies what it has of the model and the optimizer (`Snapshots.snapshot`); a thread of each
rank then writes the copy, compares with its peers whether that worked, hashes the files and commits the checkpoint,
exactly as a checkpoint in the foreground is. Their exchanges have a process group of their own, beside those of
training. One checkpoint is written at a time: where the next is due before, training waits. What fails is raised by all
ranks in the same step, or at the end of the run, which waits too.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...integrations.host.trained import Snapshots
from ..job import Job
from . import checkpoints


class Background:
    """Writes the checkpoints of a job; a context. Making one is collective, and so are its methods."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.host.trained, Snapshots), "the rules of its trainer refuse checkpoint.background"
        self._job, self._weights = job, job.host.trained
        self._group = dist.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.wait()
            self._pool.shutdown()
            dist.destroy_process_group(self._group)

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        """Copy a checkpoint and begin to write it, as `checkpoints.save` does."""
        self.wait()
        write = checkpoints.begin(root, step, lambda directory: self._weights.snapshot(directory, self._group))
        self._writing = self._pool.submit(checkpoints.finish, root, step, state, write, keep, self._group)

    def look(self) -> None:
        """Between two steps: raise what has failed, if every rank is done. Raises RankError, on every rank."""
        if self._writing is not None and self._job.gather(float(self._writing.done())).all():
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is written. Raises RankError, on every rank."""
        if self._writing is not None:
            with self._job.watchdog.working("waiting for the checkpoint that is being written"):
                self._writing.result()
            self._writing = None
