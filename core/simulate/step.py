"""Runs a plan in simulated time: every pass of every rank at every stage, what moves between them, what they hold.

When passes start and end is `events`, what they take `passes`, what moves and what hides it `costs.exposed`, what is
held `costs.memory`. The gradient sum of a device starts when its last rank has finished, or with the last backward
where the host overlaps the two; the update starts when all devices have theirs. Left out: contention between links and
between the ranks of a host, and the data loader.

O(passes x stages); 1,024 ranks of 64 micro-batches take about a second (benchmarks/planning/simulator.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ..aliases import Floats
from ..costs.context import PlanningContext
from ..costs.exposed import gradient_sum_s
from ..costs.memory import fixed_bytes, peaks_of_stage
from ..machine.layout import most_share
from ..plan.step_plan import StepPlan
from .events import Event, play
from .passes import PassTimes

SpanKind = Literal["F", "R", "B", "W", "C", "G", "U"]
SPAN_KINDS: dict[SpanKind, str] = {
    "F": "forward",
    "R": "forward again",
    "B": "backward",
    "W": "weight gradients",
    "C": "exposed communication",
    "G": "gradient sum",
    "U": "update",
}


class Span(NamedTuple):
    """What one rank of one stage does from ``start_s`` to ``end_s`` of the step."""

    stage: int
    rank: int
    """Of the plane."""
    kind: SpanKind
    micro_batch: int
    """Its number in its direction (`StepPlan.passes`); -1 for what belongs to none."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """Predicted seconds and bytes of one step; arrays are [devices of a pipeline, plane ranks]."""

    step_s: float
    passes_s: float
    """When the last pass of all ends."""
    busy_s: Floats
    """Compute."""
    exposed_s: Floats
    """Communication that no compute hides, gradient sum included."""
    update_s: float
    """Of the step, on every rank."""
    peak_bytes: Floats
    """The most that a rank holds: weights and optimizer, activations, prefix KV, what a pass needs while it runs."""
    activation_bytes: Floats
    """The most of it that is there in passes alone."""
    spans: tuple[Span, ...]
    """By start within each rank; empty where not asked for."""

    @property
    def imbalance(self) -> float:
        """Busiest rank of the plane over the mean one, stages summed; 1.0 is even."""
        ranks = self.busy_s.sum(axis=0)
        return float(ranks.max() / ranks.mean()) if ranks.any() else 1.0

    @property
    def working_s(self) -> float:
        """The step without what its busiest rank spends in communication that nothing hides and in the update."""
        return self.step_s - self.update_s - float(self.exposed_s.flat[self.busy_s.argmax()])

    @property
    def exposed_frac(self) -> float:
        """Share of all ranks' time in communication that nothing hides."""
        return float(self.exposed_s.mean() / self.step_s) if self.step_s else 0.0

    @property
    def bubble_frac(self) -> float:
        """Share of all ranks' time in which they wait for other ranks or stages."""
        working_s = float(self.busy_s.mean() + self.exposed_s.mean()) + self.update_s
        return max(0.0, 1.0 - working_s / self.step_s) if self.step_s else 0.0


def simulate(
    plan: StepPlan, context: PlanningContext, *, record: bool = True, times: PassTimes | None = None
) -> Simulation:
    """Run a lawful plan in simulated time; ``record`` keeps the spans, ``times`` are those of its passes if known."""
    work = times or PassTimes(plan, context)
    shape = (plan.limits.num_devices, plan.limits.num_ranks)
    device_of = [plan.limits.device_of_stage(stage) for stage in range(plan.limits.num_stages)]
    exposed, free, last_backward = np.zeros(shape), np.zeros(shape).tolist(), [0.0] * shape[0]
    spans: list[Span] = []
    waits = context.traffic.waits_for_sends and plan.in_host_schedule
    for event in play(plan, work.seconds, work.hand_over, waits=waits):
        stage, op, ranks, start_s, _, slowest_s, free_s = event
        device = device_of[stage]
        for rank in ranks:
            free[device][rank] = free_s
            if work.talks or waits:
                exposed[device, rank] += work.exposed_s(stage, op, rank) + (free_s - slowest_s if waits else 0.0)
            if record:
                spans += _spans_of(event, rank, work.parts(stage, op, rank))
        if op.kind == "B":
            last_backward[device] = max(last_backward[device], start_s)
    step_s = _end_of_step(plan, context, np.array(free), exposed, last_backward, spans if record else None)
    stages = [plan.limits.stages_of_device(device) for device in range(shape[0])]
    peaks_at = [[peak for peak, _ in peaks_of_stage(plan, stage)] for stage in range(len(device_of))]
    peaks = np.array([np.max([peaks_at[stage] for stage in own], axis=0) for own in stages])
    busy_at = work.busy_s()
    busy = np.array([busy_at[list(own)].sum(axis=0) for own in stages])
    memories = [(context.at(own[0]).costs.memory, plan.limits.at(own[0])) for own in stages]
    update, fixed = (
        np.array(each)[:, None]
        for each in zip(*((memory.update_bytes, fixed_bytes(memory, of)) for memory, of in memories), strict=True)
    )
    held = np.maximum(peaks, update) + fixed
    spans.sort(key=lambda span: span[:2] + span[4:])
    passes_s = max(map(max, free))
    return Simulation(step_s, passes_s, busy, exposed, _update_s(context), held, peaks, tuple(spans))


def _spans_of(event: Event, rank: int, parts: Iterable[tuple[SpanKind, float]]) -> list[Span]:
    spans, now = [], event.start_s
    for kind, seconds in parts:
        spans.append(Span(event.stage, rank, kind, event.op.micro_batch, now, now + seconds))
        now += seconds
    return spans


def _end_of_step(
    plan: StepPlan,
    context: PlanningContext,
    free: Floats,
    exposed: Floats,
    last_backward: list[float],
    spans: list[Span] | None,
) -> float:
    """Gradient sum of every device, then the update of all: the end of the step. Adds to ``exposed`` and ``spans``.
    ``last_backward``: when the last backward of each device begins, from which on a sum that overlaps can run."""
    traffic = context.traffic
    ends: list[tuple[float, float]] = []
    # A host overlaps in the trainer's own schedule alone, and where every rank has a backward.
    busy = all(plan.of_rank(rank) for rank in range(plan.limits.num_ranks))
    overlaps = traffic.overlap_gradients and plan.in_host_schedule and busy
    for stage, ready in enumerate(free.max(axis=1).tolist()):
        sum_s = gradient_sum_s(context, stage)
        if overlaps:
            sum_s = max(0.0, sum_s - (ready - last_backward[stage]))
        exposed[stage] += sum_s
        ends.append((ready, ready + sum_s))
    update_s, begin = _update_s(context), max(end for _, end in ends)
    for stage, (ready, end) in enumerate(ends):
        for rank in range(plan.limits.num_ranks) if spans is not None else ():
            closing = [Span(stage, rank, "G", -1, ready, end), Span(stage, rank, "U", -1, begin, begin + update_s)]
            spans += [span for span in closing if span.end_s > span.start_s]  # type: ignore[operator]
    return begin + update_s


def after_passes_s(context: PlanningContext, *, overlaps: bool = True) -> float:
    """No step takes less than this after its last pass [s]: the update, and a gradient sum that nothing overlaps.
    ``overlaps``: it may be one that the trainer's own schedule runs, which overlaps the sum where the trainer does."""
    if overlaps and context.traffic.overlap_gradients:
        return _update_s(context)
    return _update_s(context) + min(gradient_sum_s(context, stage) for stage in range(context.layout.pp))


def _update_s(context: PlanningContext) -> float:
    sharded = context.traffic.sharding != "none"
    update_s = most_share(context.layout.layers) * context.costs.update_s
    return update_s / (context.layout.dp_cp_size if sharded else 1)
