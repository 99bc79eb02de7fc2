"""What ``train --trace`` tells: measured steps of every variant, each beside the simulator's prediction of its plan.

In the trace steps follow each other on one time axis; everything that belongs to one step begins together: measured and
predicted, evenload and baselines. A gap is waiting, in the measured tracks as in the predicted ones: a gradient sum is
shown from when its last rank has come, and so is the update. How much each rank waits is summed up as its `bubbles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ...core.errors import EvenloadError
from ...core.planning.planner import Planned
from ...core.simulate.step import Span, simulate
from ..pictures.trace import Track, write_trace
from .bubbles import Place, bubbles_of
from .job import Job, logger

_GAP = 0.05
"""Between two steps, as a share of the longer one's length."""


@dataclass(frozen=True)
class _Recorded:
    name: str
    step: int
    planned: Planned
    spans: Sequence[Span]

    @cached_property
    def predicted(self) -> tuple[Span, ...]:
        return simulate(self.planned.plan, self.planned.chain.context, record=True).spans


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
        spans = gather_spans(mine)
        if self._job.leads:
            self._steps.append(_Recorded(name, step, planned, spans))

    def bubbles(self) -> dict[str, list[dict[str, Any]]]:
        """By variant what each rank of each stage waits, measured and predicted (`Bubbles.rows`); rank 0 knows."""
        found = {}
        for name in _ours_first({one.name for one in self._steps}):
            steps = [one for one in self._steps if one.name == name]
            found[name] = bubbles_of(one.spans for one in steps).rows(bubbles_of(one.predicted for one in steps))
        return found

    def write(self) -> None:
        """Write what is recorded, on rank 0. A disk that fails now is no reason to end a training run."""
        if self._path is None or not self._job.leads:
            return
        about = {
            "recipe": self._job.recipe.model_dump(mode="json", exclude_defaults=True),
            "host": self._job.host.describe(),
            "steps": sorted({one.step for one in self._steps}),
            "predicted with": self._steps[-1].planned.chain.context.costs.source,
            "bubbles": self.bubbles(),
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
            tracks += [
                Track(f"{one.name}, measured", plan, one.spans, begin_s),
                Track(f"{one.name}, predicted", plan, one.predicted, begin_s),
            ]
        yield from tracks
        begin_s += (1 + _GAP) * max((span.end_s for track in tracks for span in track.spans), default=0.0)


def gather_spans(mine: tuple[Span, ...]) -> list[Span]:
    """What all ranks recorded of a step, of tensor-parallel peers the first, without what is waiting. Collective."""
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return list(_shown(everyone))


def _shown(ranks: Sequence[tuple[Span, ...]]) -> Iterator[Span]:
    """The spans of one rank for each (stage, plane rank), its tensor-parallel peers left out, without what is waiting.

    A collective begins when its last rank has come: the gradient sum of a stage, the update of all stages.
    """
    places: dict[Place, tuple[Span, ...]] = {}
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


def _ours_first(names: set[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "evenload", name))
