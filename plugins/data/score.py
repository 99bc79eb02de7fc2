"""Losses of every token of the recipe's data by a trained model, on disk, for runs that are compared with it.

All samples are scored once, on the recipe's ranks: a forward a token. What is written (`reference`) depends on the
model and the data, not on ranks or plans; policies of data have no part in it. Where `sparse` leaves blocks of keys
out, files and result say so, the losses of samples that are drawn are dense, and those of domains are corrected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import refuse_first
from ...core.recipe.recipe import Recipe
from ...core.registry import DataPlugin
from ...runtime.files import LOCK, refuse_taken
from ...training.progress import Progress, silent
from ...training.verbs.export import checkpoint_in
from .reference import LossFiles, LossPlaces, left_unfinished

if TYPE_CHECKING:
    from ...core.planning.planner import Draw, Planned
    from ...integrations.host.scoring import Scores
    from ...runtime.attention.sparse import SparsePass
    from ...training.job import Job


def asked(recipe: Recipe, out: Path, checkpoint: Path | None) -> tuple[Recipe, Path | None]:
    """The recipe without policies of data, and the checkpoint to take. Raises EvenloadError; starts nothing."""
    refuse_others(out)
    refuse_first(
        (recipe.adapts, "score scores one model's data, and no tenants'", "plugins.lora", "disable plugins.lora"),
        (
            checkpoint is None and recipe.model.weights is None,
            "a model that nothing has trained is no reference",
            "no --checkpoint, model.weights null",
            "add --checkpoint DIR, a folder that checkpoint.dir has named",
        ),
    )
    off = {f"plugins.{one.name}.enabled": False for one in recipe.enabled_of(DataPlugin)}
    return recipe.changed(off) if off else recipe, checkpoint and checkpoint_in(checkpoint)


def refuse_others(out: Path) -> None:
    """As `refuse_taken`; what a score that was ended has left is begun anew."""
    refuse_taken(out, {LOCK, *left_unfinished(out)})


def score(recipe: Recipe, checkpoint: Path | None, out: Path, progress: Progress = silent) -> dict[str, Any] | None:
    """Write the losses on this rank; on rank 0 what they come to by domain."""
    from ...runtime.world.agreement import from_first  # and torch, which the launcher needs not
    from ...training.checkpoint.checkpoints import require_whole
    from ...training.job import run_rank

    def work(job: Job) -> dict[str, Any]:
        from_first(lambda: refuse_others(out))  # another one may have ended since
        if checkpoint is not None:
            with job.watchdog.working("loading the checkpoint"):
                require_whole(checkpoint)
                job.host.load(checkpoint / "trainer")
        return _write(job, out, progress)

    return run_rank(recipe, work, writes=out)


def _write(job: Job, out: Path, progress: Progress) -> dict[str, Any]:
    from ...integrations.host.scoring import Scores
    from ...runtime.world.agreement import from_first
    from ...training.drawing import scorable
    from ...training.job import logger
    from .scoring import Scorer

    begin, samples, done = time.perf_counter(), scorable(job.source), 0
    places = LossPlaces(job.source)
    files = LossFiles(out, job.source) if job.is_rank0 else None
    scorer = Scorer(job, least=2)
    draws: list[Draw] = []

    def plans() -> Iterator[Planned]:
        nonlocal done
        done = 0
        draws.clear()
        for planned in scorer.plans(samples, sparse=True):
            own = planned.draw.own
            draws.append(own)
            yield planned
            done += len(own.samples)
            progress("score", done, len(samples), "")

    def scored(planned: Planned, sparse: SparsePass | None) -> Scores:
        draw = planned.draw
        labels, tokens_of, mark = job.labels_of(draw), job.tokens_of(draw), job.watchdog.at
        losses = job.host.token_losses(planned.plan, tokens_of, labels=labels, mark=mark, sparse=sparse)
        rows = {place: own.numpy().astype(np.float64) for place, own in losses.items()}
        if files:
            for place, row in rows.items():  # twins come last: their losses, which are dense, stay
                files.write(int(draw.samples[place]), row)
        sums = from_first(lambda: np.array([rows[place].sum() for place in range(len(draw.samples))]))
        return Scores(sums, draw.num_targets)

    assert scorer.passes is not None
    if job.recipe.sparse.is_on and not scorer.passes.is_on:
        logger.warning("sparse has no effect: no sample has sparse.min_length %d tokens", job.recipe.sparse.min_length)
    if job.recipe.sparse.is_on and job.recipe.sparse.choose == "kept":
        logger.warning("sparse has no effect in score: it scores a sample once, and the first pass of kept is dense")
    passed = scorer.passes.whole(plans, scored)
    sums: dict[str, list[float]] = {name: [] for name in places.parts}
    targets = dict.fromkeys(places.parts, 0)
    for draw, own in zip(draws, passed.scores, strict=True):
        for sample, loss, count in zip(draw.samples.tolist(), own.losses.tolist(), own.targets.tolist(), strict=True):
            name, _ = places.of(sample)
            sums[name].append(loss)
            targets[name] += count
    sparse = None if passed.error is None else asdict(passed.error)
    if passed.error:
        logger.info("the loss of all: %s", passed.error.text)
    return {
        "folder": str(out),
        "bytes": files.finish(None if sparse is None or sparse["dense"] else sparse) if files else 0,
        "seconds": time.perf_counter() - begin,
        "domains": {
            name: {"samples": len(own), "targets": targets[name], "loss": math.fsum(own) / max(1, targets[name])}
            for name, own in sums.items()
        },
        "sparse": sparse,
    }
