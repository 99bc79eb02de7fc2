"""How much of a step each rank of each stage waits: its bubble, by one definition for measured and simulated steps.

    bubble of a rank = 1 - work / step      bubble of a step = 1 - all work of all ranks and stages / (ranks x step)

Work is the time that a rank's spans cover: its passes with what they exchange inside, the gradient sum from when the
last rank of its stage has come, the update from when all have. The step lasts from where ranks line up to the end of
the last span of any rank. Waiting falls into three parts: before a rank's first pass (the fill of a pipeline), between
its passes, and after its last one (the drain, slower ranks), so that a reader sees which of them to fight.

Spans are wall time: where other programs use the cores of a CPU, what they take inside a pass counts as work. (`train`
has `bubble_frac` of every step besides: 1 - compute / step, in which that, gradient sum and update are idleness.)
Several steps are summed. `core.simulate.Simulation.bubble_frac` is the same of one step, but for a host that waits
until its sends have arrived: there that counts as communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..core.simulate.step import Span

Place = tuple[int, int]
"""(pipeline stage, plane rank)."""


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
