"""Measured steps of every variant, next to the simulator's prediction of their plans: a run's trace and pictures.

In the trace steps follow each other on one time axis; everything that belongs to one step begins together: measured and
predicted, evenload and baselines. A gap is waiting, in the measured tracks as in the predicted ones: a gradient sum is
shown from when its last rank has come, and so is the update. How much each rank waits is summed up as its `bubbles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import EvenloadError
from ...core.planning.judge import certified_s
from ...core.planning.planner import Planned
from ...core.planning.rivals import STOCK
from ...core.simulate.step import Simulation, simulate
from ..forecast.forecast import Forecast, PlannedStep, Simulated
from ..job import Job, logger
from ..metrics import MeasuredStep
from ..pictures import draw
from ..pictures.planners import OURS
from ..pictures.trace import Track, write_trace
from ..pipelines import bubbles_of, on_devices
from ..step_hooks import TrainedStep

_MOST_DRAWN = 50
"""Steps that pictures are made of: their spans are kept until the end of the run."""
_GAP = 0.05
"""Between two steps, as a share of the longer one's length."""


@dataclass(frozen=True)
class _Recorded:
    name: str
    step: int
    planned: Planned
    taken: MeasuredStep

    @cached_property
    def predicted(self) -> Simulation:
        return simulate(self.planned.plan, self.planned.chain.context, record=True)


class Recording:
    """The recorded steps of a run; rank 0 holds and writes them. Nothing is recorded that nobody asked for.

    The run's ``first`` step warms up, and is recorded only where there is no other.
    """

    def __init__(self, job: Job, first: int, pictures: Mapping[str, Path | None]) -> None:
        self._job, self._path, last = job, job.recipe.log.trace, job.recipe.train.steps
        begin = min(first + 1, last - 1)
        self._pictures = {name: path for name, path in pictures.items() if path is not None}
        self._traced = range(begin, min(begin + job.recipe.log.trace_steps, last) if self._path else begin)
        self._drawn = range(begin, min(begin + _MOST_DRAWN, last) if self._pictures else begin)
        self._steps: list[_Recorded] = []
        self.written: str | None = None
        """The trace's path, once it is there."""

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step in self._traced or step in self._drawn

    def add(self, step: int, trained: Mapping[str, TrainedStep]) -> None:
        """Keep what all ranks did in a step, by variant; the trace is written after the last step that it holds."""
        if self._job.is_rank0 and self.wants(step):
            self._steps += [_Recorded(name, step, one.planned, one.taken) for name, one in trained.items()]
            if step == self._traced.stop - 1:
                self._write()

    def bubbles(self) -> dict[str, list[dict[str, Any]]]:
        """By variant what each rank of each stage waits, measured and predicted (`Bubbles.rows`); rank 0 knows."""
        rows = {}
        in_order = sorted(self._in_trace(), key=lambda one: (one.name != OURS, one.name))
        for name, group in groupby(in_order, key=lambda one: one.name):
            steps = list(group)
            predicted = bubbles_of(on_devices(one.predicted.spans, one.planned.plan.limits) for one in steps)
            rows[name] = bubbles_of(one.taken.spans for one in steps).rows(predicted)
        return rows

    def draw(self) -> dict[str, str]:
        """Draw the pictures of the measured steps, on rank 0; by kind the files that were written."""
        drawn: dict[str, str] = {}
        if steps := [one for one in self._steps if one.step in self._drawn]:
            forecast = forecast_of(self._job, steps)
            for kind, path in self._pictures.items():
                with _or_warn(kind):
                    draw(forecast, **{kind: path})
                    drawn[kind] = str(path)
        return drawn

    def _in_trace(self) -> list[_Recorded]:
        return [one for one in self._steps if one.step in self._traced]

    def _write(self) -> None:
        assert self._path is not None
        steps = self._in_trace()
        about = {
            "recipe": self._job.recipe.model_dump(mode="json", exclude_defaults=True),
            "host": self._job.host.describe(),
            "steps": sorted({one.step for one in steps}),
            "predicted with": steps[-1].planned.chain.context.costs.source,
            "bubbles": self.bubbles(),
        }
        with _or_warn("trace"):
            write_trace(self._path, list(tracks_of(steps)), about)
            self.written = str(self._path)


@contextmanager
def _or_warn(kind: str) -> Iterator[None]:
    """A disk that fails now is no reason to end a training run."""
    try:
        yield
    except EvenloadError as error:
        logger.warning("no %s: %s", kind, error)


def forecast_of(job: Job, steps: Sequence[_Recorded]) -> Forecast:
    """The measured steps in the form in which `plan` shows predicted ones."""
    rows = []
    for _, group in groupby(steps, key=lambda one: one.step):
        variants = {one.name: one for one in group}
        own = variants.pop(OURS)
        # `plan` calls the stock baseline by what it does.
        baselines = {"padded" if name == STOCK else name: _measured(one) for name, one in variants.items()}
        ordered = dict(sorted(baselines.items(), key=lambda item: item[0] != "padded"))
        least_s = certified_s(own.planned.plan, own.planned.chain.context)
        rows.append(PlannedStep(_measured(own), ordered, own.taken.plan_s, own.planned.draw.delay_steps, least_s))
    return Forecast(job.recipe, job.chain, job.source.lengths, tuple(rows), times="measured")


def _measured(one: _Recorded) -> Simulated:
    """A step as it was measured, in the form of a simulated one; what ranks hold stays predicted."""
    exposed_s = np.zeros_like(one.taken.busy_s)
    update_s = np.zeros_like(one.taken.busy_s)
    for span in one.taken.spans:
        seconds = exposed_s if span.kind in "CG" else update_s if span.kind == "U" else None
        if seconds is not None:
            seconds[span.stage, span.rank] += span.end_s - span.start_s
    outcome = replace(
        one.predicted,
        step_s=one.taken.step_s - one.taken.wait_s,
        busy_s=one.taken.busy_s,
        exposed_s=exposed_s,
        update_s=float(update_s.mean()),
        spans=tuple(one.taken.spans),
    )
    return Simulated(one.planned.plan, outcome)


def tracks_of(steps: Sequence[_Recorded]) -> Iterator[Track]:
    """Measured and predicted tracks, evenload's first, steps one after the other."""
    begin_s = 0.0
    for _, group in groupby(steps, key=lambda one: one.step):
        length_s = 0.0
        for one in sorted(group, key=lambda one: one.name != OURS):
            for what, spans in (("measured", one.taken.spans), ("predicted", one.predicted.spans)):
                yield Track(f"{one.name}, {what}", one.planned.plan, spans, begin_s)
                length_s = max([length_s, *(span.end_s for span in spans)])
        begin_s += (1 + _GAP) * length_s
