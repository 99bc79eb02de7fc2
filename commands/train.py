"""Train a recipe: plan, run, log, save; again with each baseline, if asked, for the table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from ..core.errors import EvenloadError, RankError
from ..core.planning.planner import Planned
from ..core.recipe.recipe import Recipe
from ..core.recipe.sections import Train
from ._shared.drawing import num_waiting
from ._shared.job import Job, logger, open_host, run_rank
from ._shared.metrics import Idle, Row, Taken, summary, writer
from ._shared.recording import Recording
from ._shared.refitting import PredictedStep, Refitting, predict_step
from ._shared.show import Progress, progress
from .saving.resuming import drawing_after, keep, resume


def train(recipe: Recipe, against: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Train on this rank; with ``against``, each baseline trains first on the same batches. Lists every step."""
    return run_rank(recipe, lambda job: _train_all(job, against))


def _train_all(job: Job, against: tuple[str, ...]) -> dict[str, Any]:
    variants: dict[str, Any] = {}
    recording = Recording(job)
    with progress(job.leads) as bar:
        for name in against:
            fresh = replace(job, host=open_host(job.recipe, job.world))
            _, variants[name] = _run(fresh, name, bar, recording)
            fresh.host.close()
        rows, own = _run(job, "", bar, recording)
    return {
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "data": job.source.report(),
        "steps": [asdict(row) for row in rows],
        **own,
        "variants": {**variants, "evenload": own},
        "ratio": {name: own["tokens_per_s"] / v["tokens_per_s"] for name, v in variants.items() if v["tokens_per_s"]},
        "trace": recording.written,
        "bubbles": recording.bubbles(),
    }


def _run(job: Job, baseline: str, bar: Progress, recording: Recording) -> tuple[list[Row], dict[str, Any]]:
    """All steps with one planner, and what they come to; only evenload's own run resumes and saves."""
    recipe, keeps, name = job.recipe, not baseline, baseline or "evenload"
    state = resume(job) if keeps and recipe.checkpoint.resume else None
    first, drawing = (state["step"], drawing_after(job, state)) if state else (0, job.drawing())
    refitting = Refitting(job, replace(job.chain, instead=baseline), state.get("refit") if state else None)
    planner = job.planner(drawing, refitting.chain, refitting.first)
    rows: list[Row] = []
    idle = Idle()
    with (
        writer(recipe if job.leads and keeps else None) as write,
        bar.task(name, recipe.train.steps) as tick,
        ThreadPoolExecutor(1) as aside,
    ):
        for step in range(first, recipe.train.steps):
            job.watchdog.at("waiting for the plan", step)
            with _underway(job, begun=bool(rows)):
                planned = planner.next()
                # On the rank that reports, beside the step: large plans take the simulator a second.
                future = aside.submit(predict_step, planned, refits=refitting.on) if job.leads else None
                measured = _take(job, planned, step, record=recording.wants(step, first))
            predicted_step = future.result() if future else None
            refitting.after(planner, step, planned, measured, predicted_step)
            row = _row(planned, measured, step, learning_rate(step, recipe.train), predicted_step)
            rows.append(row)
            idle.add(measured)
            write(row, planned)
            tick(f"loss {row.loss:.4f}  {row.tokens / row.step_s:,.0f} tokens/s")
            if recording.wants(step, first):
                recording.add(name, step, planned, measured.result.spans)
                if keeps and not recording.wants(step + 1, first):
                    recording.write()
            if keeps and recipe.checkpoint.dir and _is_due(step + 1, recipe):
                keep(job, recipe.checkpoint.dir, step, planned, refitting.state(planner))
    if keeps and rows and rows[-1].waiting:
        where = "they are in the checkpoint" if recipe.checkpoint.dir else "no checkpoint.dir keeps them"
        logger.info("%d samples still wait for a later batch; %s", rows[-1].waiting, where)
    return rows, {**summary(rows), "idle": idle.shares(), "refit": refitting.report()}


@contextmanager
def _underway(job: Job, *, begun: bool) -> Iterator[None]:
    """Once a step has been trained, what refuses the next one is work that failed and no wrong request: a RankError."""
    try:
        yield
    except EvenloadError as error:
        if isinstance(error, RankError) or not begun:
            raise
        raise RankError(f"rank {job.world.rank}: {error.what}", error.found, error.do) from error


def _take(job: Job, planned: Planned, step: int, *, record: bool) -> Taken:
    """Run a step on all ranks and compare what they measured. Collective."""
    if record:
        job.watchdog.at("lining up", step, waits=True)
        job.gather(0.0)
    start = time.perf_counter()
    result = job.host.train_step(
        planned.plan,
        job.tokens_of(planned.draw),
        lr=learning_rate(step, job.recipe.train),
        mark=lambda where: job.watchdog.at(where, step),
        record=record,
    )
    step_s = time.perf_counter() - start + planned.waited_s
    job.watchdog.at("comparing times", step, waits=True)
    measured = job.gather(step_s, planned.plan_s, planned.waited_s, result.busy_s, result.forward_s)
    # DeepSpeed tells a norm of -1 where a gradient is not finite. The update is done, but no checkpoint holds it yet.
    if not (math.isfinite(result.loss) and 0 <= result.grad_norm < math.inf):
        raise RankError(
            "the loss or its gradient is not finite",
            f"loss {result.loss}, gradient norm {result.grad_norm} at step {step}",
            "lower train.lr, or look at the data; the last good checkpoint is from an earlier step",
        )
    slowest_s, plan_s, wait_s = measured[:, :3].max(axis=0).tolist()
    seconds = job.of_stages(measured[:, 3:])
    return Taken(result, slowest_s, plan_s, wait_s, seconds[..., 0], seconds[..., 1])


def _row(planned: Planned, taken: Taken, step: int, lr: float, predicted_step: PredictedStep | None) -> Row:
    busy = taken.busy_s.sum(axis=0)
    idle = 1 - taken.busy_s / taken.step_s
    return Row(
        step=step,
        loss=taken.result.loss,
        grad_norm=taken.result.grad_norm,
        lr=lr,
        tokens=planned.plan.num_tokens,
        step_s=taken.step_s,
        plan_s=taken.plan_s,
        plan_wait_s=taken.wait_s,
        imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
        padding_frac=planned.plan.padding_frac,
        bound_s=planned.plan.bound_s,
        delay_steps=planned.draw.delay_steps,
        waiting=num_waiting(planned.draw.state),
        predicted_s=predicted_step.step_s if predicted_step else 0.0,
        bubble_frac=float(idle.mean()),
        bubble_worst=float(idle.max()),
    )


def learning_rate(step: int, config: Train) -> float:
    """A function of the step alone, so that a resumed run continues it. Warm-up is linear."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.min_lr + (config.lr - config.min_lr) * shape[config.lr_schedule]


def _is_due(done: int, recipe: Recipe) -> bool:
    return done % recipe.checkpoint.every == 0 or done == recipe.train.steps
