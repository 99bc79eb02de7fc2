"""What a run keeps so that it can go on, and how it goes on: what `train` does and `verify` proves.

Checkpoints are kept that are due, the last one and, where the run validates, the best one. With
``checkpoint.background`` they are written while training goes on. When one is due every rank copies what it has of the
model and the optimizer (`Snapshots.snapshot`); a thread of each rank then writes the copy, compares with its peers
whether that worked, hashes the files and commits the checkpoint, exactly as a checkpoint in the foreground is. Their
exchanges have a process group of their own, next to those of training. One checkpoint is written at a time: where the
next is due before, training waits. What fails is raised by all ranks in the same step, or at the end of the run, which
waits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from ...core.errors import EvenloadError
from ...data.content import are_same
from ...data.mixed import MixedSource
from ...data.sources import Source
from ...integrations.host.host import Host
from ...integrations.host.trained import Snapshots
from ...runtime.world.agreement import all_or_none
from ..checkpoint import checkpoints
from ..job import Job, logger

BEST = "best"
"""The folder in a run's checkpoints that keeps the one of the lowest validation loss, as a run's folder keeps its last
ones: a run can go on from it."""


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


def keep(
    job: Job,
    root: Path,
    step: int,
    order: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    background: Background | None = None,
    *,
    most: int | None = None,
) -> None:
    """Write a checkpoint after a step, with ``more`` state of the run, or begin to in the ``background``. Collective.
    ``order``: the draw's state (`Draw.state`).

    ``most`` checkpoints stay, where that is another number than the recipe's. The batch that is planned ahead was not
    trained on, and is drawn again. Raises RankError if it could not be written; the last good one is untouched.
    """
    data = fingerprints_of(job.source)
    state = {"order": order, "data": data, "recipe": job.recipe.model_dump(mode="json"), **(more or {})}
    with job.watchdog.working("saving the checkpoint", step):
        most = most or job.recipe.checkpoint.keep
        if background is not None:
            background.save(root, step + 1, state, most)
        else:
            checkpoints.save(root, step + 1, state, job.host.save, most)


class Keeper(NamedTuple):
    """Keeps the checkpoints that the recipe of a job asks for."""

    job: Job
    background: Background | None

    def after(
        self, step: int, order: Mapping[str, Any], state: Callable[[], Mapping[str, Any]], *, best: bool, last: bool
    ) -> None:
        """Do what is due after a step. ``order``: as in `keep`; ``state``: gives what a checkpoint keeps of the run;
        ``best``: the step has the lowest validation loss so far; ``last``: the run ends early with it. Collective."""
        if self.job.replicas.own:  # the first one writes what all hold
            return
        if self.background:
            self.background.look()
        config, done = self.job.recipe.checkpoint, step + 1
        due = last or done % config.every == 0 or done == self.job.recipe.train.steps
        if config.dir and config.best and best:
            keep(self.job, config.dir / BEST, step, order, state(), self.background, most=1)
        if config.dir and due:
            keep(self.job, config.dir, step, order, state(), self.background)


@contextmanager
def keeping(job: Job) -> Iterator[Keeper]:
    """Keeps the checkpoints that the recipe asks for; at the end all are written. Collective."""
    config = job.recipe.checkpoint
    writes = config.background and config.dir is not None and job.replicas.own == 0
    with Background(job) if writes else nullcontext() as background:
        yield Keeper(job, background)


def resume(job: Job, root: Path | None = None, beside: Sequence[Host] = ()) -> dict[str, Any] | None:
    """Load the last good checkpoint of a folder (the recipe's), if there is one; its state. Collective.

    Trainers ``beside`` go on from it too. Raises EvenloadError if it was made with other data or another model, or if
    every checkpoint there is damaged.
    """
    root, config = root or job.recipe.checkpoint.dir, job.recipe.checkpoint
    if root is None:
        return None
    with job.watchdog.working("verifying the checkpoint"):
        newest = checkpoints.newest_whole(root, verify=config.verify)
    if newest is None:
        return None
    folder, state = newest[0], newest[1].state
    all_or_none(lambda: _refuse_other_data(job.source, folder.name, state.get("data")))
    if not isinstance(state.get("order"), dict):
        do = "choose another checkpoint.dir, or set checkpoint.resume=false"
        what = "the checkpoint does not say which samples were trained on"
        raise EvenloadError(what, f"{folder.name} has no order", do)
    with job.watchdog.working("loading the checkpoint"):
        for host in (job.host, *beside):
            host.load(folder / "trainer")
    logger.info("resumed from %s at step %d", folder, state["step"])
    return state


def fingerprints_of(source: Source) -> str | dict[str, str]:
    """What a checkpoint keeps of the data: of domains that of each, by its name."""
    return source.fingerprints if isinstance(source, MixedSource) else source.fingerprint


def _refuse_other_data(source: Source, name: str, kept: Any) -> None:
    """Raise EvenloadError where any data that a checkpoint knows are others now; domains may come and go."""
    now, do = fingerprints_of(source), "restore data.*, or start anew with another checkpoint.dir"
    do += " (or checkpoint.resume=false)"
    if isinstance(now, dict) != isinstance(kept, dict):
        forms = "one source", "domains"
        detail = f"{name} has {forms[isinstance(kept, dict)]}, the recipe {forms[isinstance(now, dict)]}"
        raise EvenloadError("the checkpoint's samples are not in the form of the recipe's", detail, do)
    pairs = {"data.source": (kept, now)} if isinstance(now, str) else {}
    if isinstance(now, dict):
        pairs = {f"the domain {key}": (kept[key], own) for key, own in now.items() if key in kept}
    for what, (before, own) in pairs.items():
        if not are_same(before, own, f"the data of the checkpoint {name}"):
            detail = f"{name} has samples of fingerprint {before}, {what} now gives {own}"
            raise EvenloadError("the checkpoint was made with other data", detail, do)
