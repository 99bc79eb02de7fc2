"""What ``train --trace`` writes: measured steps of every variant, each beside the simulator's prediction of its plan.

Steps follow each other on one time axis; everything that belongs to one step begins together: measured and predicted,
evenload and baselines. A gap is waiting, in the measured tracks as in the predicted ones: a gradient sum is shown from
when its last rank has come, and so is the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ..core.errors import EvenloadError
from ..core.planner import Planned
from ..core.simulate import Span, simulate
from .job import Job, logger
from .pictures.trace import Track, write_trace

_GAP = 0.05
"""Between two steps, as a share of the longer one's length."""


class _Recorded(NamedTuple):
    name: str
    step: int
    planned: Planned
    spans: tuple[Span, ...]


class Recording:
    """The recorded steps of a run; rank 0 holds and writes them. Without ``log.trace`` nothing is recorded."""

    def __init__(self, job: Job) -> None:
        self._job, self._path = job, job.recipe.log.trace
        self._steps: list[_Recorded] = []
        self.written: str | None = None
        """The trace's path, once it is there."""

    def wants(self, step: int, first: int) -> bool:
        """Whether a step of a run that began with step ``first`` is recorded: not the first, which warms up."""
        train, log = self._job.recipe.train, self._job.recipe.log
        begin = min(first + 1, train.steps - 1)
        return log.trace is not None and begin <= step < min(begin + log.trace_steps, train.steps)

    def add(self, name: str, step: int, planned: Planned, mine: tuple[Span, ...]) -> None:
        """Keep what all ranks did in a step. Collective."""
        everyone: list[Any] = [None] * self._job.world.size
        dist.all_gather_object(everyone, mine)
        if self._job.leads:
            self._steps.append(_Recorded(name, step, planned, tuple(_shown(everyone))))

    def write(self) -> None:
        """Write what is recorded, on rank 0. A disk that fails now is no reason to end a training run."""
        if self._path is None or not self._job.leads:
            return
        about = {
            "recipe": self._job.recipe.model_dump(mode="json", exclude_defaults=True),
            "host": self._job.host.describe(),
            "steps": sorted({one.step for one in self._steps}),
            "predicted with": self._steps[-1].planned.chain.situation.costs.source,
        }
        try:
            write_trace(self._path, list(tracks_of(self._steps)), about)
        except EvenloadError as error:
            logger.warning("no trace: %s", error)
        else:
            self.written = str(self._path)


def tracks_of(steps: Sequence[_Recorded]) -> Iterator[Track]:
    """Measured and predicted tracks, evenload's first, steps one after the other."""
    begin_s = 0.0
    for step in sorted({one.step for one in steps}):
        tracks = []
        for one in sorted((one for one in steps if one.step == step), key=lambda one: one.name != "evenload"):
            plan = one.planned.plan
            predicted = simulate(plan, one.planned.chain.situation, record=True).spans
            tracks += [
                Track(f"{one.name}, measured", plan, one.spans, begin_s),
                Track(f"{one.name}, predicted", plan, predicted, begin_s),
            ]
        yield from tracks
        begin_s += (1 + _GAP) * max((span.end_s for track in tracks for span in track.spans), default=0.0)


def _shown(ranks: Sequence[tuple[Span, ...]]) -> Iterator[Span]:
    """The spans of one rank for each (stage, plane rank), its tensor-parallel peers left out, without what is waiting.

    A collective begins when its last rank has come: the gradient sum of a stage, the update of all stages.
    """
    places: dict[tuple[int, int], tuple[Span, ...]] = {}
    for spans in ranks:
        if spans:
            places.setdefault(spans[0][:2], spans)
    latest: dict[tuple[str, int], float] = {}
    for span in (span for spans in places.values() for span in spans):
        latest[_meeting(span)] = max(latest.get(_meeting(span), 0.0), span.start_s)
    for spans in places.values():
        for span in spans:
            together = span.kind in ("G", "U")
            yield span._replace(start_s=min(latest[_meeting(span)], span.end_s)) if together else span


def _meeting(span: Span) -> tuple[str, int]:
    return span.kind, span.stage if span.kind == "G" else -1
