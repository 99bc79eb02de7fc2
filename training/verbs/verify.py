"""Prove on the user's own recipe that the plugins changed nothing.

Some steps of the run that `train` would do - the same plans, reduction, clipping, optimizer, checkpoint and resume -
are each compared with the same step of plain training (`proof.steps`): the loss, every parameter's gradient, the norm,
every weight and both of Adam's moments after the update, the tokens that were really run, and the samples that they
belong to. In every second step half of the tokens carry no loss (`proof.masking`); with ``weights`` the targets of all
steps have drawn ones (`proof.weighing`). In the middle the run is saved, its
trainer closed, and another one opened that resumes, on another layout where the ranks allow one. Then batches follow
that take the branches which the first ones did not (`proof.reach`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.planning.chain import PlanChain
from ...core.planning.planner import Planned, Planner
from ...core.recipe.recipe import Recipe
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.agreement import everyone, from_first
from ...runtime.world.world import World
from ..adapting import adapter_training
from ..checkpoint.resuming import keep, resume
from ..drawing import batch_size, draw_of
from ..job import Job, in_world, logger, open_trainer
from ..learning import LoadHistory
from ..measuring import learning_rate
from ..progress import Progress, silent
from ..proof.generation import verify_generation
from ..proof.prompting import prompting, without_divided_tokens
from ..proof.proven_steps import ProvenSteps, other_layout
from ..proof.reach import choose, planned
from ..proof.steps import Beside, ProofBatch
from ..proof.weighing import KINDS
from ..step_hooks import StepHooks


def verify(
    recipe: Recipe,
    steps: int = 3,
    progress: Progress = silent,
    *,
    weights: bool = False,
    generation: bool = False,
    prompts: Path | None = None,
) -> dict[str, Any] | None:
    """Verify on this rank, over so many updates before and after the resume; ``weights``: targets have drawn ones;
    ``generation``: samples instead of updates, of a file of prompts or of the recipe's data."""
    if generation:
        recipe = without_divided_tokens(recipe)
        return verify_generation(recipe, prompting(recipe, prompts), progress)
    if recipe.adapts:
        return adapter_training(recipe).verify(recipe, steps, progress, weights=weights)

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        return _Proof(recipe, world, watchdog, steps, progress, weights=weights).run()

    return in_world(recipe, work)


class _Proof:
    """A run and plain training next to it, through a resume. Everything is collective."""

    def __init__(
        self, recipe: Recipe, world: World, watchdog: Watchdog, steps: int, progress: Progress, *, weights: bool
    ) -> None:
        self._recipe, self._weights = recipe, weights
        self._world = world
        self._watchdog = watchdog
        self._steps = steps
        self._before = (steps + 1) // 2 if steps > 1 else steps
        """Steps before the resume."""
        self._proven = ProvenSteps(steps, progress)

    def run(self) -> dict[str, Any]:
        folder = self._shared_folder() if self._before < self._steps else None
        try:
            return self._run(folder)
        finally:
            if folder is not None and self._world.leads:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: Path | None) -> dict[str, Any]:
        last = self._steps if folder is None else self._before
        with open_trainer(self._recipe, self._world, self._watchdog, deals=True) as job:
            job.say_unused("verify")
            self._proven.begin(job.host, job.chain)
            self._expected = _undisturbed(job)
            beside = Beside.of(job)
            history = LoadHistory(job.chain)
            planner = job.planner(job.dealt(job.drawing()))
            last_planned = self._take(beside, planner, history, range(last))
            self._reach(beside, history.newest(job.chain))
            if folder is not None:
                if job.world.replica == 0:
                    keep(job, folder, last - 1, last_planned.draw.state, StepHooks([history]).state(planner))
                everyone(None, "job")
            beside.plain.close()
        if folder is not None:
            recipe = other_layout(self._recipe, self._world.size) or self._recipe
            with open_trainer(recipe, self._world, self._watchdog, deals=True) as job:
                self._go_on(job, beside, folder)
        return self._proven.summary()

    def _go_on(self, job: Job, beside: Beside, folder: Path) -> None:
        """The steps after the resume, by a trainer of their own."""
        state = resume(job, folder)
        assert state is not None
        self._proven.resume(job.host, state["step"])
        beside = replace(beside, job=job)
        history = LoadHistory(job.chain)
        StepHooks([history]).restore(state)
        planner = job.planner(
            job.dealt(job.drawing(state["order"])), history.newest(job.chain), history.first(job.chain)
        )
        self._take(beside, planner, history, range(state["step"], self._steps))
        beside.plain.close()

    def _take(self, beside: Beside, planner: Planner, history: LoadHistory, numbers: range) -> Planned:
        """Steps in the run's own order; the last of them as it was planned."""
        for number in numbers:
            newest = planner.next()
            self._prove(beside, number, ProofBatch(newest.draw, newest.plan, next(self._expected)), number)
            history.learn(planner, beside.result)
        return newest

    def _prove(self, beside: Beside, number: int, batch: ProofBatch, of_rate: int) -> None:
        """One step, with the learning rate of step ``of_rate``; in every second one half of the tokens are masked."""
        weights = KINDS[number % len(KINDS)] if self._weights else None
        batch = batch._replace(masked=number % 2 == 1, weights=weights)
        proven = beside.step(number, batch, learning_rate(of_rate, beside.job.recipe.train))
        self._proven.add(beside.job.chain, batch.plan, proven)

    def _reach(self, beside: Beside, chain: PlanChain) -> None:
        """Steps on further batches of the chain, for branches that no step has taken yet; of one replica alone, as each
        would want batches of its own."""
        job = beside.job
        missing = set() if len(job.replicas.chains) > 1 else self._proven.missing
        lengths, targets = job.source.lengths, job.source.targets
        size, seed = batch_size(job.recipe).mean_samples(lengths), job.recipe.train.seed
        trained = np.arange(len(lengths)) if targets is None else np.flatnonzero(targets)
        with job.watchdog.working("choosing batches for other branches"):
            batches = from_first(lambda: choose(chain, missing, lengths[trained], size, seed)) if missing else []
        for one in batches:
            number, samples = len(self._proven.proven), trained[one.samples]
            draw = draw_of(job.source, samples)
            batch = ProofBatch(draw, planned(chain, draw.lengths, one.prefers), samples)
            self._prove(beside, number, batch, self._steps - 1)

    def _shared_folder(self) -> Path | None:
        """A new folder for the checkpoint that every rank sees; None, with a warning, where there is none."""
        root = self._recipe.checkpoint.dir

        def make() -> str:
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix="verify-", dir=root)

        folder = Path(from_first(make, "job"))
        if all(everyone(folder.is_dir(), "job")):
            return folder
        logger.warning("the resume is not verified: %s is not seen by every rank; set checkpoint.dir", folder)
        return None


def _undisturbed(job: Job) -> Iterator[npt.NDArray[np.int64]]:
    drawing = job.drawing()
    while True:
        yield drawing().samples
