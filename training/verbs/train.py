"""Train a recipe: plan, run, log, save; along with it, if asked, baselines that train the same batches in turn with it.

Every variant has a trainer of its own, all begin with the same weights, and each trains on its own plans of the same
batches: so losses can be compared at every step, and evenload's run has the losses, samples and checkpoints that it has
alone. The device holds a model for every variant; `bench` needs one for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...core.recipe.recipe import Recipe
from ..adapting import adapter_training
from ..checkpoint.checkpoints import last_good
from ..checkpoint.resuming import BEST, keeping, resume
from ..drawing import Drawing
from ..early_end import listening, say_ended
from ..expert_loads import loads_writer, say_without_copies
from ..garbage import collected
from ..job import Job, logger, open_host, run_rank
from ..measuring import OURS, BaselinePlanner, in_turn
from ..metrics import totals
from ..progress import Progress, silent
from ..run.recording import Recording
from ..run.variant import Variant, as_rank_error
from ..run.writers import Write, entry_of_step, entry_of_validation, writer
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
        recipe, lambda job: _train_all(job, against, pictures or {}, progress), recipe.checkpoint.dir, deals=True
    )


def _train_all(job: Job, against: tuple[str, ...], pictures: Pictures, progress: Progress) -> dict[str, Any]:
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
        state = resume(job, beside=[other.host for other in others]) if job.recipe.checkpoint.resume else None
        first = state["step"] if state else 0
        if first >= job.recipe.train.steps:
            text = "no step is trained: the checkpoint is of step %d, train.steps is %d"
            logger.warning(text, first, job.recipe.train.steps)
        drawing = job.drawing(state and state["order"])
        validation = ValidationRun(job) if job.held_out is not None else None
        hooks = StepHooks([*run_hooks(RunContext(job, drawing)), *filter(None, [validation])])
        job = replace(job, reference=hooks.reference)
        variants = {name: Variant(other, name, state) for name, other in zip(against, others, strict=True)}
        variants[OURS] = Variant(job, OURS, state)
        if state:
            hooks.restore(state)
            hooks.warn_of_unread(state)
        recording = Recording(job, first, pictures)
        ends = _run(job, variants, drawing, hooks, first, recording, validation, progress)
        exported = None
        if recipe.train.export and not ends:
            from ..checkpoint.exporting import write_export  # and Transformers

            exported = write_export(job, recipe.train.export, progress)
    own = variants[OURS]
    own.exercised.say()
    say_without_copies(job.chain, [row.moe for row in own.rows])
    results = {name: variant.result() for name, variant in variants.items()}
    rates = {name: results[name]["tokens_per_s"] for name in against}
    root = recipe.checkpoint.dir
    return {
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
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


def _run(
    job: Job,
    variants: dict[str, Variant],
    drawing: Drawing,
    hooks: StepHooks,
    first: int,
    recording: Recording,
    validation: ValidationRun | None,
    progress: Progress,
) -> str:
    """All steps, every variant in its turn; only evenload's own run is logged and saved. Why it ended early, if so."""
    recipe, own, ends = job.recipe, variants[OURS], ""
    planner = job.planner(job.dealt(drawing), *own.chains)
    followers = {name: BaselinePlanner(*variant.chains) for name, variant in variants.items() if variant is not own}
    planners = {name: follower.planner for name, follower in followers.items()} | {OURS: planner}

    def state_now() -> dict[str, Any]:
        return {**own.hooks.state(planner), **hooks.state(planner)}

    with ExitStack() as opened, ThreadPoolExecutor(1) as executor:
        write = opened.enter_context(writer(recipe, is_rank0=job.is_rank0, first=first))
        write_loads = opened.enter_context(loads_writer(job, goes_on=first > 0))
        keeper = opened.enter_context(keeping(job))
        ending = opened.enter_context(listening(recipe))
        collect = opened.enter_context(collected(recipe.train.gc_every))
        for name in variants:
            progress(name, 0, recipe.train.steps - first, "")
        if validation and not first:
            write(entry_of_validation(validation.run(0)))
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
                recorded = recording.wants(step)
                trained[name] = variant.step(planned[name], step, executor, ending, record=recorded)
                variant.same_plans &= planned[name].plan.digest == planned[OURS].plan.digest
                variant.hooks.after(planners[name], trained[name])
                progress(name, step + 1 - first, recipe.train.steps - first, variant.said)
            hooks.after(planner, trained[OURS])
            done = step + 1
            if done < recipe.train.steps:
                ends = next(filter(None, (one.taken.ends for one in trained.values())), "")
            write(entry_of_step(own.rows[-1], planned[OURS], recipe.train.steps, ends))
            write_loads(step, trained[OURS].taken.result)
            recording.add(step, {name: trained[name] for name in planned})
            best = validation is not None and _evaluated(job, validation, done, write)
            keeper.after(step, planned[OURS], state_now, best=best, last=bool(ends))
            collect(done)
            if ends:
                say_ended(ends, done, recipe)
                break
    _say_untrained(own, recipe)
    return ends


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
