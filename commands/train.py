"""Train a recipe: plan, run, log, save; again with each baseline, if asked, for the table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import EvenloadError
from ..core.planner import Planned
from ..core.recipe import Recipe
from ..core.sections import Train
from ..data.order import SampleOrder
from . import checkpoints
from .hosts import integration
from .job import Job, logger, run_rank
from .show import Progress, progress


@dataclass(frozen=True)
class Row:
    """Measures of one step; seconds are wall time on the slowest rank."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    plan_s: float
    plan_wait_s: float
    imbalance: float
    """Busiest data-parallel rank over mean, measured."""
    padding_frac: float
    bound_s: float
    """Certified lower bound on the busiest rank's time, predicted; 0 where the planner gives none."""


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
    first, order = _resume(job) if keeps else (0, fresh_order(job))
    planner = job.planner(order, replace(job.chain, instead=baseline))
    rows: list[Row] = []
    with (
        _writer(recipe if job.leads and keeps else None) as write,
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
                state = {"order": planned.draw.state, "recipe": recipe.model_dump(mode="json")}
                checkpoints.save(
                    recipe.checkpoint.dir, step + 1, state, job.host.save, job.world.rank, recipe.checkpoint.keep
                )
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
    )


def summary(rows: list[Row], warmup: int = 1) -> dict[str, Any]:
    """Totals over the steps after the first, which pays for warming up."""
    timed = rows[warmup:] or rows
    if not timed:
        return {"tokens_per_s": 0.0, "imbalance": 1.0, "padding_frac": 0.0, "loss": None, "plan_share": 0.0}
    seconds = sum(row.step_s for row in timed)
    return {
        "tokens_per_s": sum(row.tokens for row in timed) / seconds,
        "imbalance": float(np.mean([row.imbalance for row in timed])),
        "padding_frac": float(np.mean([row.padding_frac for row in timed])),
        "plan_share": sum(row.plan_wait_s for row in timed) / seconds,
        "loss": rows[-1].loss,
    }


def learning_rate(step: int, config: Train) -> float:
    """A function of the step alone, so that a resumed run continues it. Warm-up is linear."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.min_lr + (config.lr - config.min_lr) * shape[config.lr_schedule]


def fresh_order(job: Job) -> SampleOrder:
    """The order of samples from the first step on."""
    return SampleOrder(len(job.source.lengths), job.recipe.train.seed)


def _resume(job: Job) -> tuple[int, SampleOrder]:
    config = job.recipe.checkpoint
    found = checkpoints.last_good(config.dir) if config.dir and config.resume else None
    if found is None:
        return 0, fresh_order(job)
    job.watchdog.at("loading the checkpoint")
    state = checkpoints.read_state(found)
    job.host.load(found / "trainer")
    order = SampleOrder.from_state(state["order"], len(job.source.lengths))
    logger.info("resumed from %s at step %d", found, state["step"])
    return int(state["step"]), order


def _is_due(done: int, recipe: Recipe) -> bool:
    return done % recipe.checkpoint.every == 0 or done == recipe.train.steps


@contextmanager
def _writer(recipe: Recipe | None) -> Iterator[Any]:
    """Writes rows to TensorBoard under ``evenload/`` and to the JSON Lines log, where the recipe names them."""
    if recipe is None:
        yield lambda row, planned: None
        return
    board = None
    if recipe.log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(recipe.log.tensorboard))
    lines = _open_log(recipe.log.jsonl)

    def write(row: Row, planned: Planned) -> None:
        values = asdict(row)
        if board is not None and row.step % recipe.log.every == 0:
            board.add_scalar("evenload/tokens_per_s", row.tokens / row.step_s, row.step)
            for name, value in values.items():
                if name not in ("step", "tokens"):
                    board.add_scalar(f"evenload/{name}", value, row.step)
        if lines is not None:
            samples = planned.draw.samples.tolist()
            lines.write(json.dumps({**values, "planner": planned.plan.made_by, "samples": samples}) + "\n")
            lines.flush()

    try:
        yield write
    finally:
        if board is not None:
            board.close()
        if lines is not None:
            lines.close()


def _open_log(path: Path | None) -> Any:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")
