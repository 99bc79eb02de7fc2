"""Train a recipe: plan, run, log, save; again with each baseline, if asked, for the table."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from typing import Any

from ..core.errors import EvenloadError
from ..core.planner import Planned
from ..core.recipe import Recipe
from ..core.sections import Train
from . import checkpoints
from .drawing import Drawing, num_waiting
from .hosts import integration
from .job import Job, logger, run_rank
from .metrics import Row, summary, writer
from .show import Progress, progress


def train(recipe: Recipe, against: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Train on this rank; with ``against``, each baseline trains first on the same batches. Lists every step."""
    return run_rank(recipe, lambda job: _train_all(job, against))


def _train_all(job: Job, against: tuple[str, ...]) -> dict[str, Any]:
    variants: dict[str, Any] = {}
    with progress(job.leads) as bar:
        for name in against:
            fresh = replace(job, host=integration(job.recipe.trainer).open_host(job.recipe, job.world))
            rows = _run(fresh, name, bar)
            fresh.host.close()
            variants[name] = summary(rows)
        rows = _run(job, "", bar)
    own = summary(rows)
    return {
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "data": job.source.report(),
        "steps": [asdict(row) for row in rows],
        **own,
        "variants": {**variants, "evenload": own},
        "ratio": {name: own["tokens_per_s"] / v["tokens_per_s"] for name, v in variants.items() if v["tokens_per_s"]},
    }


def _run(job: Job, baseline: str, bar: Progress) -> list[Row]:
    """All steps with one planner; only evenload's own run resumes and saves."""
    recipe, keeps = job.recipe, not baseline
    first, drawing = _resume(job) if keeps else (0, job.drawing())
    planner = job.planner(drawing, replace(job.chain, instead=baseline))
    rows: list[Row] = []
    with (
        writer(recipe if job.leads and keeps else None) as write,
        bar.task(baseline or "evenload", recipe.train.steps) as tick,
    ):
        for step in range(first, recipe.train.steps):
            job.watchdog.at("waiting for the plan", step)
            planned = planner.next()
            row = _step(job, planned, step)
            rows.append(row)
            write(row, planned)
            tick(f"loss {row.loss:.4f}  {row.tokens / row.step_s:,.0f} tokens/s")
            if keeps and recipe.checkpoint.dir and _is_due(step + 1, recipe):
                job.watchdog.at("checkpoint", step)
                data = job.source.report()["fingerprint"]
                state = {"order": planned.draw.state, "data": data, "recipe": recipe.model_dump(mode="json")}
                checkpoints.save(
                    recipe.checkpoint.dir, step + 1, state, job.host.save, job.world.rank, recipe.checkpoint.keep
                )
    if keeps and rows and rows[-1].waiting:
        where = "they are in the checkpoint" if recipe.checkpoint.dir else "no checkpoint.dir keeps them"
        logger.info("%d samples still wait for a later batch; %s", rows[-1].waiting, where)
    return rows


def _step(job: Job, planned: Planned, step: int) -> Row:
    lr = learning_rate(step, job.recipe.train)
    start = time.perf_counter()
    result = job.host.train_step(
        planned.plan, job.tokens_of(planned.draw), lr=lr, mark=lambda where: job.watchdog.at(where, step)
    )
    step_s = time.perf_counter() - start + planned.waited_s
    job.watchdog.at("comparing times", step, waits=True)
    measured = job.gather(step_s, result.busy_s, planned.plan_s, planned.waited_s)
    if not math.isfinite(result.loss):
        raise EvenloadError(
            "the loss is not finite", f"{result.loss} at step {step}", "lower train.lr, or look at the data"
        )
    busy = job.of_plane(measured[:, 1])
    slowest_s, _, plan_s, wait_s = measured.max(axis=0).tolist()
    return Row(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        tokens=planned.plan.num_tokens,
        step_s=slowest_s,
        plan_s=plan_s,
        plan_wait_s=wait_s,
        imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
        padding_frac=planned.plan.padding_frac,
        bound_s=planned.plan.bound_s,
        delay_steps=planned.draw.delay_steps,
        waiting=num_waiting(planned.draw.state),
    )


def learning_rate(step: int, config: Train) -> float:
    """A function of the step alone, so that a resumed run continues it. Warm-up is linear."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.min_lr + (config.lr - config.min_lr) * shape[config.lr_schedule]


def _resume(job: Job) -> tuple[int, Drawing]:
    config = job.recipe.checkpoint
    found = checkpoints.last_good(config.dir) if config.dir and config.resume else None
    if found is None:
        return 0, job.drawing()
    job.watchdog.at("loading the checkpoint")
    state = checkpoints.read_state(found)
    data = job.source.report()["fingerprint"]
    if state["data"] != data:
        raise EvenloadError(
            "the checkpoint was made with other data",
            f"{found.name} has samples of fingerprint {state['data']}, data.source now gives {data}",
            "restore data.*, or start anew with another checkpoint.dir (or checkpoint.resume=false)",
        )
    job.host.load(found / "trainer")
    drawing = job.drawing(state["order"])
    logger.info("resumed from %s at step %d", found, state["step"])
    if drawing.num_ranks not in (None, job.chain.limits.num_ranks):
        logger.info("outliers are held back as for the %d ranks that the run began with", drawing.num_ranks)
    return int(state["step"]), drawing


def _is_due(done: int, recipe: Recipe) -> bool:
    return done % recipe.checkpoint.every == 0 or done == recipe.train.steps
