"""The pipeline of a step: how much each rank of a stage waits, and what a plan does beyond giving ranks their tokens.

    bubble of a rank = 1 - work / step      bubble of a step = 1 - all work of all ranks and stages / (ranks x step)

A bubble is by one definition for measured and simulated steps. Work is the time that a rank's spans cover: its passes
with what they exchange inside, the gradient sum from when the last rank of its stage has come, the update from when all
have. The step lasts from where ranks line up to the end of the last span of any rank. Waiting falls into three parts:
before a rank's first pass (the fill of a pipeline), between its passes, and after its last one (the drain, slower
ranks), so that a reader sees which of them to fight.

Spans are wall time: where other programs use the cores of a CPU, what they take inside a pass counts as work. (`train`
has `bubble_frac` of every step besides: 1 - compute / step, in which that, gradient sum and update are idleness.)
Several steps are summed. `core.simulate.Simulation.bubble_frac` is the same of one step, but for a host that waits
until its sends have arrived: there that counts as communication.

Chunks, layers that run again, and weight gradients of their own are predicted or counted from the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..core.costs.memory import peaks_of_stage
from ..core.plan.limits import Limits
from ..core.plan.order import orders_of_stage
from ..core.plan.step_plan import Op, StepPlan
from ..core.simulate.step import Simulation, Span

Place = tuple[int, int]
"""(pipeline stage, plane rank)."""
Row = dict[str, Any]


def name_of(place: Place, num_stages: int) -> str:
    """A row of a picture in words."""
    return f"stage {place[0]}, rank {place[1]}" if num_stages > 1 else f"rank {place[1]}"


class Waits(NamedTuple):
    """Seconds that one rank of one stage waits."""

    before_s: float = 0.0
    """Until its first pass."""
    between_s: float = 0.0
    """Between its passes."""
    after_s: float = 0.0
    """From its last pass on."""


class Bubbles(NamedTuple):
    """The waiting of every rank in some steps."""

    step_s: float
    """Of the steps together."""
    waits: dict[Place, Waits]

    @property
    def frac(self) -> float:
        """Mean over ranks and stages."""
        waited_s = sum(sum(one) for one in self.waits.values())
        return waited_s / (len(self.waits) * self.step_s) if self.waits and self.step_s else 0.0

    def rows(self, predicted: Bubbles) -> list[dict[str, Any]]:
        """One JSON object a place, shares of the step; the parts sum to ``bubble_frac``."""
        step_s = self.step_s or 1.0
        return [
            {
                "stage": stage,
                "rank": rank,
                "bubble_frac": sum(one) / step_s,
                "predicted_bubble_frac": predicted.of(stage, rank),
                "before_frac": one.before_s / step_s,
                "between_frac": one.between_s / step_s,
                "after_frac": one.after_s / step_s,
            }
            for (stage, rank), one in sorted(self.waits.items())
        ]

    def of(self, stage: int, rank: int) -> float:
        """The bubble of one rank."""
        return sum(self.waits.get((stage, rank), Waits())) / self.step_s if self.step_s else 0.0


def bubbles_of(steps: Iterable[Sequence[Span]]) -> Bubbles:
    """The bubbles of recorded steps, each the spans of all its ranks from 0, where they lined up."""
    total_s, total = 0.0, dict[Place, Waits]()
    for spans in steps:
        step_s = max((span.end_s for span in spans), default=0.0)
        total_s += step_s
        for place, group in by_place(spans):
            total[place] = Waits(*map(sum, zip(total.get(place, Waits()), _waits(list(group), step_s), strict=True)))
    return Bubbles(total_s, total)


def on_devices(spans: Iterable[Span], limits: Limits) -> list[Span]:
    """Spans by the devices of their stages, as they are measured."""
    return [span._replace(stage=limits.device_of_stage(span.stage)) for span in spans]


def by_place(spans: Iterable[Span]) -> Iterator[tuple[Place, Iterator[Span]]]:
    """The spans of each rank of each stage, by their start."""
    return groupby(sorted(spans, key=lambda span: (*span[:2], span.start_s)), key=lambda span: span[:2])


def _waits(spans: Sequence[Span], step_s: float) -> Waits:
    """The waits of a rank; ``spans`` by start, and one may lie inside another."""
    passes = [span for span in spans if span.kind not in "GU"]
    first_s, last_s = (passes[0].start_s, max(span.end_s for span in passes)) if passes else (step_s, step_s)
    waits, now = [0.0, 0.0, 0.0], 0.0
    for start_s, end_s in (*((span.start_s, span.end_s) for span in spans), (step_s, step_s)):
        if start_s > now:
            waits[0 if start_s <= first_s else 1 if start_s <= last_s else 2] += start_s - now
        now = max(now, end_s)
    return Waits(*waits)


def recomputed(plan: StepPlan, stage: int, number: int) -> int:
    """Layers of a stage that the backward of a micro-batch runs again because the plan says so."""
    return plan.recompute[stage][number] if plan.recompute and number >= 0 else 0


def describe(plan: StepPlan, outcome: Simulation) -> Row | None:
    """The pipeline of one step as ``plan --json`` tells it; None for a plan of one stage that recomputes nothing.

    ``chunks`` are the slices of sequences that are cut, ``most_chunks`` those of the sequence with the most. By stage:
    ``recomputed_layers`` of ``layers`` (of a stage, times micro-batches), ``weight_passes`` (backwards whose weight
    gradients are a pass of their own), ``in_flight`` (the most micro-batches between forward and backward on a rank),
    ``bubble_frac``, ``peak_activation_bytes`` (the most of a rank: what a cap counts and `bench` measures) and
    ``peak_bytes`` (with weights and optimizer); the last three are those of the stage's device.
    """
    limits = plan.limits
    if limits.num_stages == 1 and not plan.recompute:
        return None
    chunks = Counter(s.sequence for m in plan.micro_batches for s in m.slices if s.sequence in plan.cut)
    return {
        "micro_batches": len(plan.micro_batches),
        "cut_sequences": len(chunks),
        "chunks": chunks.total(),
        "most_chunks": max(chunks.values(), default=1),
        "stages": [_stage(plan, outcome, stage) for stage in range(limits.num_stages)],
    }


def _stage(plan: StepPlan, outcome: Simulation, stage: int) -> Row:
    device = plan.limits.device_of_stage(stage)
    working_s = float(np.mean(outcome.busy_s[device] + outcome.exposed_s[device])) + outcome.update_s
    return {
        "stage": stage,
        "recomputed_layers": sum(plan.recompute[stage]) if plan.recompute else 0,
        "layers": plan.limits.at(stage).layers_per_stage * len(plan.micro_batches),
        "weight_passes": len(plan.split[stage]) if plan.split else 0,
        "in_flight": max((_in_flight(ops) for ops in orders_of_stage(plan, stage)), default=0),
        "bubble_frac": max(0.0, 1.0 - working_s / outcome.step_s) if outcome.step_s else 0.0,
        "peak_activation_bytes": max(peak for peak, _ in peaks_of_stage(plan, stage)),
        "peak_bytes": float(outcome.peak_bytes[device].max()),
    }


def _in_flight(ops: list[Op]) -> int:
    return int(np.cumsum([{"F": 1, "B": -1, "W": 0}[op.kind] for op in ops]).max(initial=0))
