"""Train a recipe: plan, run, log, save; beside it, if asked, baselines that train the same batches in turn with it.

Every variant has a trainer of its own, all begin with the same weights, and each trains on its own plans of the same
batches: so losses can be compared at every step, and evenload's run has the losses, samples and checkpoints that it has
alone. The device holds a model for every variant; `bench` needs one for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import EvenloadError, RankError
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Planned, Planner
from ..core.recipe.recipe import Recipe
from ._shared.drawing import num_waiting
from ._shared.expert_loads import loads_writer, say_without_copies
from ._shared.job import Job, logger, open_host, run_rank
from ._shared.measuring import OURS, Follower, compare, in_turn, learning_rate, measure_step
from ._shared.metrics import Row, Taken, summary, writer
from ._shared.recording import Recording
from ._shared.refitting import PredictedStep, Refitting, predict_step
from ._shared.show import progress
from .experts.history import LoadHistory
from .saving.resuming import drawing_after, keep, resume

Pictures = Mapping[str, Path | None]
"""Where ``plot`` and ``report`` of the measured steps go; None where they are not asked for."""


def train(recipe: Recipe, against: tuple[str, ...] = (), pictures: Pictures | None = None) -> dict[str, Any] | None:
    """Train on this rank; with ``against``, each baseline trains the same batches in turn. Lists every step."""
    return run_rank(recipe, lambda job: _train_all(job, against, pictures or {}))


def _train_all(job: Job, against: tuple[str, ...], pictures: Pictures) -> dict[str, Any]:
    job.say_stock("train")
    with ExitStack() as trainers:
        others = [replace(job, host=open_host(job.recipe, job.world)) for _ in against]
        for other in others:
            trainers.callback(other.host.close)
        state = resume(job, beside=[other.host for other in others]) if job.recipe.checkpoint.resume else None
        first = state["step"] if state else 0
        if first >= job.recipe.train.steps:
            text = "no step is trained: the checkpoint is of step %d, train.steps is %d"
            logger.warning(text, first, job.recipe.train.steps)
        variants = {name: _Variant(other, name, state) for name, other in zip(against, others, strict=True)}
        variants[OURS] = _Variant(job, OURS, state)
        recording = Recording(job, first, pictures)
        _run(job, variants, state, recording)
    own = variants[OURS]
    say_without_copies(job.chain, [row.moe for row in own.rows])
    results = {name: variant.result() for name, variant in variants.items()}
    rates = {name: results[name]["tokens_per_s"] for name in against}
    return {
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "data": job.source.report(),
        "steps": [asdict(row) for row in own.rows],
        **results[OURS],
        "variants": results,
        "ratio": {name: results[OURS]["tokens_per_s"] / rate for name, rate in rates.items() if rate},
        "comparison": {name: variants[name].beside(own) for name in against},
        "trace": recording.written,
        "pictures": recording.draw(),
        "bubbles": recording.bubbles(),
    }


class _Variant:
    """One way to plan the run's batches, with a trainer, costs and numbers of its own."""

    def __init__(self, job: Job, name: str, state: Mapping[str, Any] | None) -> None:
        self.job, self.name = job, name
        chain = replace(job.chain, instead="" if name == OURS else name)
        self.refitting = Refitting(job, chain, state.get("refit") if state else None)
        self.history = LoadHistory(chain, state.get("loads") if state else None)
        self.rows: list[Row] = []
        self.same_plans = True
        """Whether it planned every step as evenload did."""
        self._busy_s, self._seconds = np.zeros((0, 0)), 1.0
        """Sums over the steps after the first, which pays for warming up."""

    def step(
        self, planned: Planned, step: int, executor: Executor, *, record: bool
    ) -> tuple[Taken, PredictedStep | None]:
        """Train one step and note what it took; the prediction of its plan on the rank that reports. Collective."""
        # Beside the step: large plans take the simulator a second.
        future = executor.submit(predict_step, planned, refits=self.refitting.on) if self.job.leads else None
        with _underway(self.job, begun=bool(self.rows)):
            taken = _take(self.job, planned, step, record=record)
        predicted_step = future.result() if future else None
        rate = learning_rate(step, self.job.recipe.train)
        self.rows.append(_row(planned, taken, step, rate, predicted_step))
        begins = len(self.rows) <= 2
        self._busy_s = taken.busy_s if begins else self._busy_s + taken.busy_s
        self._seconds = taken.step_s if begins else self._seconds + taken.step_s
        return taken, predicted_step

    @property
    def chains(self) -> tuple[PlanChain, PlanChain]:
        """What plans are made with, and the first of this run."""
        return self.history.newest(self.refitting.chain), self.history.first(self.refitting.first)

    def learn(self, planner: Planner, planned: Planned, taken: Taken, predicted_step: PredictedStep | None) -> None:
        """Let its planner follow the step that it has trained last. Collective."""
        self.refitting.after(planner, self.rows[-1].step, planned, taken, predicted_step)
        self.history.after(planner, taken.result)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of what it has learned."""
        return {**self.refitting.state(planner), **self.history.state(planner)}

    def result(self) -> dict[str, Any]:
        """What its steps come to; ``idle`` is 1 - busy / step of every rank, [stages][plane ranks]."""
        idle = (1 - self._busy_s / self._seconds).tolist()
        return {**summary(self.rows), "idle": idle, "refit": self.refitting.report()}

    def beside(self, own: _Variant) -> dict[str, Any]:
        """This baseline against evenload's run: times of the steps after the first, losses of all."""
        seconds = [[row.step_s for row in variant.rows[1:]] for variant in (self, own)]
        pairs = [(row.loss, own_row.loss) for row, own_row in zip(self.rows, own.rows, strict=True)]
        losses = [abs(loss / own_loss - 1) for loss, own_loss in pairs if own_loss]
        return {**compare(*seconds), "loss_rel_diff": max(losses, default=None), "same_plans": self.same_plans}


def _run(job: Job, variants: dict[str, _Variant], state: dict[str, Any] | None, recording: Recording) -> None:
    """All steps, every variant in its turn; only evenload's own run is logged and saved."""
    recipe, own = job.recipe, variants[OURS]
    first, drawing = (state["step"], drawing_after(job, state)) if state else (0, job.drawing())
    planner = job.planner(drawing, *own.chains)
    followers = {name: Follower(*variant.chains) for name, variant in variants.items() if variant is not own}
    planners = {name: follower.planner for name, follower in followers.items()} | {OURS: planner}
    with ExitStack() as opened, ThreadPoolExecutor(1) as executor:
        write = opened.enter_context(writer(recipe if job.leads else None))
        write_loads = opened.enter_context(loads_writer(job, goes_on=first > 0))
        bar = opened.enter_context(progress(job.leads))
        ticks = {name: opened.enter_context(bar.task(name, recipe.train.steps - first)) for name in variants}
        for step in range(first, recipe.train.steps):
            job.watchdog.at("waiting for the plan", step)
            with _underway(job, begun=bool(own.rows)):
                planned = {OURS: planner.next()}
                planned |= {name: follower.plan(planned[OURS].draw) for name, follower in followers.items()}
            taken: dict[str, Taken] = {}
            for name in in_turn(list(variants), step):
                variant = variants[name]
                taken[name], predicted_step = variant.step(planned[name], step, executor, record=recording.wants(step))
                variant.same_plans &= planned[name].plan.digest == planned[OURS].plan.digest
                variant.learn(planners[name], planned[name], taken[name], predicted_step)
                row = variant.rows[-1]
                ticks[name](f"loss {row.loss:.4f}  {row.tokens / row.step_s:,.0f} tokens/s")
            write(own.rows[-1], planned[OURS])
            write_loads(step, taken[OURS].result)
            recording.add(step, planned, taken)
            done = step + 1
            due = done % recipe.checkpoint.every == 0 or done == recipe.train.steps
            if recipe.checkpoint.dir and due:
                keep(job, recipe.checkpoint.dir, step, planned[OURS], own.state(planner))
    if own.rows and own.rows[-1].waiting:
        where = "they are in the checkpoint" if recipe.checkpoint.dir else "no checkpoint.dir keeps them"
        logger.info("%d samples still wait for a later batch; %s", own.rows[-1].waiting, where)


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
    """Train a step on all ranks. Collective. Raises RankError for a loss or a gradient that is not finite."""
    taken = measure_step(job, planned, step, record=record)
    # DeepSpeed tells a norm of -1 where a gradient is not finite. The update is done, but no checkpoint holds it yet.
    if not (math.isfinite(taken.result.loss) and 0 <= taken.result.grad_norm < math.inf):
        detail = f"loss {taken.result.loss}, gradient norm {taken.result.grad_norm} at step {step}"
        do = "lower train.lr, or look at the data; the last good checkpoint is from an earlier step"
        raise RankError("the loss or its gradient is not finite", detail, do)
    return taken


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
        moe=taken.moe,
    )
