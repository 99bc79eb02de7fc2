"""One way to plan the batches of a run, with a trainer, costs and numbers of its own: evenload's, or a baseline's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import EvenloadError, RankError
from ...core.input.format import percent
from ...core.machine.shape import step_flops
from ...core.planning.chain import PlanChain
from ...core.planning.exercised import Exercised
from ...core.planning.notes import warn_of_no_trees
from ...core.planning.planner import Planned
from ...core.recipe.sizes import shape_of
from ...data.mixed import MixedSource
from ...runtime.world.replicas import named, rank_in_job
from ..drawing import num_waiting
from ..early_end import EarlyEnd
from ..job import Job, VerbJob
from ..learning import LoadHistory, Refitting, predict_step
from ..measuring import OURS, compare, learning_rate, measure_step
from ..metrics import MeasuredStep, StepRow, domain_losses, summary
from ..replicas import whole_of
from ..step_hooks import PredictedStep, StepHooks, TrainedStep
from ..stragglers import Stragglers


class Variant:
    """A trainer and the rows of the steps that it has trained."""

    def __init__(self, job: Job, name: str, state: Mapping[str, Any] | None, rows: Sequence[StepRow] = ()) -> None:
        self.job, self.name = job, name
        job.host.scores_steps = job.domains is not None
        chain = replace(job.chain, instead="" if name == OURS else name)
        self.refitting, self.history = Refitting(job, chain), LoadHistory(chain)
        self.hooks = StepHooks((self.refitting, self.history))
        """What it learns from its steps."""
        if state is not None:
            self.hooks.restore(state)
        self.rows = list(rows)
        self.exercised = Exercised()
        self.same_plans = True
        """Whether it planned every step as evenload did."""
        self._busy_s, self._seconds = np.zeros((0, 0)), 1.0
        """Sums over the steps after the first, which pays for warming up."""
        self._shape = shape_of(job.recipe.model)
        self._stragglers = Stragglers(job, says=name == OURS)

    def step(self, planned: Planned, step: int, executor: Executor, ending: EarlyEnd, *, record: bool) -> TrainedStep:
        """Train one step and note what it took. Collective."""
        # Outside the step: large plans take the simulator a second.
        future = executor.submit(predict_step, planned, refits=self.refitting.on) if self.job.world.rank == 0 else None
        with as_rank_error(self.job, begun=bool(self.rows)):
            taken = run_step(self.job, planned, step, ending, record=record)
        if taken.replicas and self.rows and self.job.recipe.planner.refit:
            self.job.replicas.learn(taken.replicas)
        predicted_step = future.result() if future else None
        self.rows.append(self._row(planned, taken, step, predicted_step))
        if self.job.is_rank0:
            self.exercised.note(planned.chain, planned.plan, None)
            if self.name == OURS and len(self.rows) == 1 and not planned.plan.trunks.any():
                warn_of_no_trees(self.job.recipe, "no samples of it that begin alike are planned as trees")
        if predicted_step and len(self.rows) > 1:
            self._stragglers.note(step, taken, predicted_step.busy_s)
        begins = len(self.rows) <= 2 or taken.busy_s.shape != self._busy_s.shape
        self._busy_s = taken.busy_s if begins else self._busy_s + taken.busy_s
        self._seconds = taken.step_s if begins else self._seconds + taken.step_s
        return TrainedStep(step, replace(planned, draw=whole_of(planned.draw)), taken, predicted_step)

    @property
    def said(self) -> str:
        """Its last step in words, for a line of progress."""
        row = self.rows[-1]
        return f"loss {row.loss:.4f}  {row.tokens / row.step_s:,.0f} tokens/s  MFU {percent(row.mfu)}"

    @property
    def chains(self) -> tuple[PlanChain, PlanChain]:
        """What plans are made with, and the first of this run."""
        return self.history.newest(self.refitting.chain), self.history.first(self.refitting.first)

    def result(self) -> dict[str, Any]:
        """What its steps come to; ``idle`` is 1 - busy / step of every rank, [stages][plane ranks]."""
        idle = (1 - self._busy_s / self._seconds).tolist()
        return {
            **summary(self.rows),
            "idle": idle,
            "stragglers": self._stragglers.rows,
            "refit": self.refitting.fitted(),
        }

    def beside(self, own: Variant) -> dict[str, Any]:
        """This baseline against evenload's run: times of the steps after the first, losses of all."""
        seconds = [[row.step_s for row in variant.rows[1:]] for variant in (self, own)]
        pairs = [(row.loss, own_row.loss) for row, own_row in zip(self.rows, own.rows, strict=True)]
        losses = [abs(loss / own_loss - 1) for loss, own_loss in pairs if own_loss]
        return {**compare(*seconds), "loss_rel_diff": max(losses, default=None), "same_plans": self.same_plans}

    def _row(self, planned: Planned, taken: MeasuredStep, step: int, predicted_step: PredictedStep | None) -> StepRow:
        chains = self.job.replicas.chains or [self.job.chain]
        rate = sum(one.context.cluster.flops_per_s * one.context.layout.world_size for one in chains)
        whole = whole_of(planned.draw)
        source, scores = self.job.source, taken.result.scores
        names = source.domains if isinstance(source, MixedSource) else ()
        return StepRow.of(
            step,
            planned,
            taken,
            loss=taken.result.loss,
            grad_norm=taken.result.grad_norm,
            lr=learning_rate(step, self.job.recipe.train),
            mfu=step_flops(self._shape, whole.lengths) / (taken.step_s * rate),
            delay_steps=planned.draw.delay_steps,
            waiting=num_waiting(planned.draw.state),
            without_target=planned.draw.without_target,
            predicted_s=predicted_step.step_s if predicted_step else 0.0,
            bubble_worst=float((1 - taken.busy_s / taken.step_s).max()),
            moe=taken.moe,
            domains=domain_losses(names, [(whole, scores)]) if scores else None,
        )


@contextmanager
def as_rank_error(job: VerbJob, *, begun: bool) -> Iterator[None]:
    """Once a step has been trained, what refuses the next one is work that failed and no wrong request: a RankError."""
    try:
        yield
    except EvenloadError as error:
        if isinstance(error, RankError) or not begun:
            raise
        raise RankError(f"rank {named(rank_in_job(job.world.rank))}: {error.what}", error.found, error.do) from error


def run_step(job: Job, planned: Planned, step: int, ending: EarlyEnd, *, record: bool) -> MeasuredStep:
    """Train a step on all ranks. Collective. Raises RankError for a loss or a gradient that is not finite."""
    taken = measure_step(job, planned, step, record=record, ending=ending)
    # DeepSpeed tells a norm of -1 where a gradient is not finite. The update is done, but no checkpoint holds it yet.
    if not (math.isfinite(taken.result.loss) and 0 <= taken.result.grad_norm < math.inf):
        detail = f"loss {taken.result.loss}, gradient norm {taken.result.grad_norm} at step {step}"
        do = "lower train.lr, or look at the data; the last good checkpoint is from an earlier step"
        raise RankError("the loss or its gradient is not finite", detail, do)
    return taken
