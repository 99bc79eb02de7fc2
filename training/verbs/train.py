"""Train a recipe: plan, run, log, save; along with it, if asked, baselines that train the same batches in turn with it.

Every variant has a trainer of its own, all begin with the same weights, and each trains on its own plans of the same
batches: so losses can be compared at every step, and evenload's run has the losses, samples and checkpoints that it has
alone. The device holds a model for every variant; `bench` needs one for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...core.machine.replicas import Roster
from ...core.planning.planner import Planner
from ...core.recipe.recipe import Recipe
from ...integrations.host.trained import Snapshots
from ...runtime.world.folder_lock import folder_lock
from ...runtime.world.replicas import JobGroup, job_group
from ...runtime.world.roster import membership
from ..adapting import adapter_training
from ..checkpoint.checkpoints import last_good
from ..checkpoint.resuming import BEST, fingerprints_of, keeping, resume
from ..drawing import Drawing
from ..early_end import listening, say_ended
from ..eras import about, begins, in_eras, refuse_to_go_on_alone, settled
from ..expert_loads import loads_writer, say_without_copies
from ..garbage import collected
from ..job import Job, logger, open_host, run_rank, with_members
from ..measuring import OURS, BaselinePlanner, in_turn
from ..metrics import totals
from ..progress import Progress, silent
from ..replicas import COMPARED_EVERY, compare_replicas
from ..run.recording import Recording
from ..run.variant import Variant, as_rank_error
from ..run.writers import Entry, Write, entry_of_step, entry_of_validation, writer
from ..step_hooks import RunContext, StepHooks, TrainedStep, run_hooks
from ..validation.validation import ValidationRun

Pictures = Mapping[str, Path | None]
"""Where ``plot`` and ``report`` of the measured steps go; None where they are not asked for."""


def train(
    recipe: Recipe, against: tuple[str, ...] = (), pictures: Pictures | None = None, progress: Progress = silent
) -> dict[str, Any] | None:
    """Train on this rank; with ``against``, each baseline trains the same batches in turn. Lists every step."""
    if recipe.adapts:
        return adapter_training(recipe).train(recipe, against, progress)
    return run_rank(
        recipe,
        lambda job: _train_all(job, recipe, against, pictures or {}, progress),
        recipe.checkpoint.dir,
        deals=True,
    )


def _train_all(
    job: Job, asked: Recipe, against: tuple[str, ...], pictures: Pictures, progress: Progress
) -> dict[str, Any]:
    job.say_stock("train")
    recipe = job.recipe
    for idle in recipe.idle():
        logger.warning(idle)
    if recipe.train.export_prompts and recipe.train.export is None:
        logger.warning("train.export_prompts has no effect: train.export is null, so there is no folder to compare")
    with ExitStack() as trainers:
        others = [replace(job, host=open_host(job.recipe, job.world)) for _ in against]
        for other in others:
            trainers.callback(other.host.close)
        run = TrainingRun(job, asked, dict(zip(against, others, strict=True)), pictures, progress)
        if member := membership():
            member.arrive(about(recipe, data=str(fingerprints_of(job.source))))
        ends = in_eras(job.watchdog, run.work, run.state, run.receive)
        job, variants, hooks = run.job, run.variants, run.hooks
        recording, validation = run.recording, run.validation
        exported = None
        if recipe.train.export and not ends and not job.replicas.own:
            from ..checkpoint.exporting import write_export  # and Transformers

            exported = write_export(job, recipe.train.export, progress)
    own = variants[OURS]
    own.exercised.say()
    say_without_copies(job.chain, [row.moe for row in own.rows])
    results = {name: variant.result() for name, variant in variants.items()}
    rates = {name: results[name]["tokens_per_s"] for name in against}
    root = recipe.checkpoint.dir
    return {
        "recipe": (asked if asked.parallel.replicas else job.recipe).model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "data": job.source.report(),
        "summary": totals(own.rows, *(map(last_good, (root, root / BEST)) if root else (None,))),
        "ended_early": ends,
        "policies": hooks.report(sum(row.step_s for row in own.rows)),
        "steps": [asdict(row) for row in own.rows],
        "validation": [asdict(row) for row in validation.rows] if validation else [],
        **results[OURS],
        "variants": results,
        "ratio": {name: results[OURS]["tokens_per_s"] / rate for name, rate in rates.items() if rate},
        "comparison": {name: variants[name].beside(own) for name in against},
        "trace": recording.written,
        "pictures": recording.draw(),
        "bubbles": recording.bubbles(),
        "export": exported,
    }


class TrainingRun:
    """The steps of a run: by this replica with the others that are there (`in_eras`), or by the one that there is."""

    def __init__(
        self, job: Job, asked: Recipe, others: Mapping[str, Job], pictures: Pictures, progress: Progress
    ) -> None:
        self.job = job
        self._asked = asked
        self._others = others
        self._pictures = pictures
        self._progress = progress
        self._saved: dict[str, Any] = {}
        self._own: Mapping[str, Any] | None = None
        """What this replica has learnt of itself."""

    def state(self) -> dict[str, Any]:
        """What the run goes on with, as a checkpoint has it; besides, the rows of its steps, and what is yet to be done
        after the last of them."""
        return {**self._saved, "rows": self.variants[OURS].rows}

    def receive(self, across: JobGroup, source: int) -> None:
        """Let replicas without weights have them. Collective over the job."""
        weights = self.job.host.trained
        assert isinstance(weights, Snapshots), "the rules of its trainer refuse parallel.replicas"
        weights.receive(across, source)

    def work(self, roster: Roster | None, state: Mapping[str, Any] | None) -> str:
        """All steps from a state on, None: from the checkpoint that is there, or the first one; why it ended early, if
        so. Collective."""
        if roster is not None:
            self.job = with_members(self.job, self._asked, roster)
        job, rows, in_memory = self.job, (state or {}).get("rows", ()), state
        if state is None and job.recipe.checkpoint.resume:
            state = resume(job, beside=[other.host for other in self._others.values()])
        first = state["step"] if state else 0
        begins(first)
        if first >= job.recipe.train.steps and not in_memory:
            text = "no step is trained: the checkpoint is of step %d, train.steps is %d"
            logger.warning(text, first, job.recipe.train.steps)
        order = state["order"] if state else None
        drawing = job.drawing(order)
        self.validation = ValidationRun(job) if job.held_out is not None else None
        self.hooks = StepHooks([*run_hooks(RunContext(job, drawing)), *filter(None, [self.validation])])
        self.job = job = replace(job, reference=self.hooks.reference)
        self.variants = {name: Variant(other, name, state) for name, other in self._others.items()}
        self.variants[OURS] = Variant(job, OURS, self._own if in_memory else state, rows)
        if state and order is not None:
            self.hooks.restore(state)
            if not in_memory:
                self.hooks.warn_of_unread(state)
        self.recording = Recording(job, first, self._pictures)
        self._saved = dict(in_memory or {"step": first, "order": order, "left": ()})
        return self._steps(drawing, first)

    def _steps(self, drawing: Drawing, first: int) -> str:
        """All steps, every variant in its turn; only evenload's own run is logged and saved."""
        job, variants, hooks, validation = self.job, self.variants, self.hooks, self.validation
        recipe, own, ends = job.recipe, variants[OURS], ""
        planner = job.planner(job.dealt(drawing), *own.chains)
        followers = {name: BaselinePlanner(*one.chains) for name, one in variants.items() if one is not own}
        planners = {name: follower.planner for name, follower in followers.items()} | {OURS: planner}

        def state_now() -> dict[str, Any]:
            return {**own.hooks.state(planner), **hooks.state(planner)}

        with ExitStack() as opened, ThreadPoolExecutor(1) as executor:
            if membership():
                opened.enter_context(folder_lock(recipe.checkpoint.dir))
            write = opened.enter_context(
                writer(recipe, is_rank0=job.is_rank0, first=first, again=self._saved.get("entry"))
            )
            write_loads = opened.enter_context(loads_writer(job, goes_on=first > 0))
            keeper = opened.enter_context(keeping(job))
            ending = opened.enter_context(listening(recipe))
            collect = opened.enter_context(collected(recipe.train.gc_every))

            def follow(done: int, order: Mapping[str, Any], left: Sequence[str]) -> None:
                """What comes after so many steps."""
                best = False
                if "validation" in left:
                    best = validation is not None and _evaluated(job, validation, done, write)
                    self._saved["left"] = ("checkpoint",)
                keeper.after(done - 1, order, state_now, best=best, last=bool(ends))
                self._saved["left"] = ()
                collect(done)

            for name in variants:
                self._progress(name, 0, recipe.train.steps - first, "")
            if validation and not first:
                write(entry_of_validation(validation.run(0)))
            if left := self._saved["left"]:
                follow(first, self._saved["order"], left)
            for step in range(first, recipe.train.steps):
                if validation:
                    validation.prepare(step + 1)
                job.watchdog.at("waiting for the plan", step)
                with as_rank_error(job, begun=bool(own.rows)):
                    # One after the last: a checkpoint holds what its plan knows.
                    planned = {OURS: hooks.next(planner, max(1, recipe.train.steps - 1 - step))}
                    planned |= {name: follower.plan(planned[OURS].draw) for name, follower in followers.items()}
                trained: dict[str, TrainedStep] = {}
                for name in in_turn(list(variants), step):
                    variant = variants[name]
                    recorded = self.recording.wants(step)
                    trained[name] = variant.step(planned[name], step, executor, ending, record=recorded)
                    variant.same_plans &= planned[name].plan.digest == planned[OURS].plan.digest
                    variant.hooks.after(planners[name], trained[name])
                    self._progress(name, step + 1 - first, recipe.train.steps - first, variant.said)
                done, order = step + 1, planned[OURS].draw.state
                self._settle(done, order, own, planner, hooks)
                hooks.after(planner, trained[OURS])
                if done < recipe.train.steps:
                    ends = next(filter(None, (one.taken.ends for one in trained.values())), "")
                entry = entry_of_step(own.rows[-1], planned[OURS], recipe.train.steps, ends)
                write(entry)
                write_loads(step, trained[OURS].taken.result)
                self.recording.add(step, {name: trained[name] for name in planned})
                self._settle(done, order, own, planner, hooks, entry=entry)
                refuse_to_go_on_alone()
                if job_group() and done % COMPARED_EVERY == 0:
                    compare_replicas(job.host, "weights", step)
                follow(done, order, ("validation", "checkpoint"))
                if ends:
                    say_ended(ends, done, recipe)
                    break
                if done < recipe.train.steps:
                    settled(done)
        _say_untrained(own, recipe)
        return ends

    def _settle(
        self,
        done: int,
        order: Mapping[str, Any],
        own: Variant,
        planner: Planner,
        hooks: StepHooks,
        entry: Entry | None = None,
    ) -> None:
        """Keep, where replicas come and go, what the run goes on with; ``entry``: what logs get of its last step."""
        if membership():
            self._own = own.hooks.state(planner)
            left = ("validation", "checkpoint")
            self._saved = {"step": done, "order": order, "left": left, "entry": entry, **hooks.state(planner)}


def _evaluated(job: Job, validation: ValidationRun, done: int, write: Write) -> bool:
    """Validate after so many steps where it is due; whether no loss was lower. Collective."""
    if validation.due(done):
        with as_rank_error(job, begun=True):
            write(entry_of_validation(validation.run(done)))
    return validation.is_best(done)


def _say_untrained(own: Variant, recipe: Recipe) -> None:
    if own.rows and own.rows[-1].waiting:
        where = "they are in the checkpoint" if recipe.checkpoint.dir else "no checkpoint.dir keeps them"
        logger.info("%d samples still wait for a later batch; %s", own.rows[-1].waiting, where)
    if left_out := sum(row.without_target for row in own.rows):
        logger.info("%d samples were left out: none of their tokens carries loss", left_out)
