"""What a run keeps so that it can go on, and how it goes on: what `train` does and `verify` proves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import EvenloadError
from ...core.planning.planner import Planned
from ...data.content import are_same
from ...data.sources import Source
from ...integrations.host.host import Host
from ...runtime.world.agreement import all_or_none
from ..drawing import Drawing
from ..job import Job, logger
from . import checkpoints
from .background import Background

BEST = "best"
"""The folder in a run's checkpoints that keeps the one of the lowest validation loss, as a run's folder keeps its last
ones: a run can go on from it."""


def keep(
    job: Job,
    root: Path,
    step: int,
    planned: Planned,
    more: Mapping[str, Any] | None = None,
    background: Background | None = None,
    *,
    most: int | None = None,
) -> None:
    """Write a checkpoint after a step, with ``more`` state of the run, or begin to in the ``background``. Collective.

    ``most`` checkpoints stay, where that is another number than the recipe's. The batch that is planned ahead was not
    trained on, and is drawn again. Raises RankError if it could not be written; the last good one is untouched.
    """
    data = job.source.fingerprint
    state = {"order": planned.draw.state, "data": data, "recipe": job.recipe.model_dump(mode="json"), **(more or {})}
    with job.watchdog.working("saving the checkpoint", step):
        most = most or job.recipe.checkpoint.keep
        if background is not None:
            background.save(root, step + 1, state, most)
        else:
            checkpoints.save(root, step + 1, state, job.host.save, most)


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


def _refuse_other_data(source: Source, name: str, kept: Any) -> None:
    if not are_same(kept, source.fingerprint, f"the data of the checkpoint {name}"):
        detail = f"{name} has samples of fingerprint {kept}, data.source now gives {source.fingerprint}"
        do = "restore data.*, or start anew with another checkpoint.dir (or checkpoint.resume=false)"
        raise EvenloadError("the checkpoint was made with other data", detail, do)


def drawing_after(job: Job, state: Mapping[str, Any]) -> Drawing:
    """Goes on with the batches of a checkpoint's state."""
    drawing = job.drawing(state["order"])
    if drawing.num_ranks not in (None, job.chain.limits.num_ranks):
        logger.info("outliers are held back as for the %d ranks that the run began with", drawing.num_ranks)
    return drawing
