"""Runs a plan in simulated time: every pass of every rank at every stage, what moves between them, what they hold.

When passes start and end is `events`, what they cost `costs` (of one stage), what moves and what hides it `traffic`,
what is held `memory`. The gradient sum of a stage starts when its last rank has finished, or with the last backward
where the host overlaps the two; the update starts when all stages have theirs. Left out: contention between links and
between the ranks of a host, and the data loader.

O(passes x stages); 1,024 ranks of 64 micro-batches take about a second (benchmarks/simulator.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .costs import Costs
from .events import Event, play
from .memory import fixed_bytes, peaks_of_stage
from .predict import pass_seconds
from .registry import Situation
from .traffic import exposed_s, gathering_s, gradient_sum_s, links_up
from .workload import Op, StepPlan

Floats = npt.NDArray[np.float64]
Kind = Literal["F", "R", "B", "C", "G", "U"]
KINDS: dict[Kind, str] = {
    "F": "forward",
    "R": "forward again",
    "B": "backward",
    "C": "exposed communication",
    "G": "gradient sum",
    "U": "update",
}


_KINDS: tuple[Literal["F", "B"], ...] = ("F", "B")
_Seconds = dict[Literal["F", "B"], list[float]]


class Span(NamedTuple):
    """What one rank of one stage does from ``start_s`` to ``end_s`` of the step."""

    stage: int
    rank: int
    """Of the plane."""
    kind: Kind
    micro_batch: int
    """Its number in its direction (`StepPlan.passes`); -1 for what belongs to none."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """Predicted seconds and bytes of one step; arrays are [stages, plane ranks]."""

    step_s: float
    busy_s: Floats
    """Compute."""
    exposed_s: Floats
    """Communication that no compute hides, gradient sum included."""
    update_s: float
    """Of the step, on every rank."""
    peak_bytes: Floats
    """The most that a rank holds: weights and optimizer, activations, prefix KV, what a pass needs while it runs."""
    spans: tuple[Span, ...]
    """By start within each rank; empty where not asked for."""

    @property
    def imbalance(self) -> float:
        """Busiest rank of the plane over the mean one, stages summed; 1.0 is even."""
        ranks = self.busy_s.sum(axis=0)
        return float(ranks.max() / ranks.mean()) if ranks.any() else 1.0

    @property
    def exposed_frac(self) -> float:
        """Share of all ranks' time in communication that nothing hides."""
        return float(self.exposed_s.mean() / self.step_s) if self.step_s else 0.0

    @property
    def bubble_frac(self) -> float:
        """Share of all ranks' time in which they wait for other ranks or stages."""
        working_s = float(self.busy_s.mean() + self.exposed_s.mean()) + self.update_s
        return max(0.0, 1.0 - working_s / self.step_s) if self.step_s else 0.0


def simulate(plan: StepPlan, situation: Situation, *, record: bool = True) -> Simulation:
    """Run a lawful plan in simulated time; ``record`` keeps the spans."""
    work = _Work(plan, situation)
    shape = (plan.limits.num_stages, plan.limits.num_ranks)
    exposed, free, hidden = np.zeros(shape), np.zeros(shape).tolist(), [0.0] * shape[0]
    spans: list[Span] = []
    waits = situation.traffic.waits_for_sends and not plan.order
    for event in play(plan, work.seconds, work.hand_over, waits=waits):
        stage, op, ranks, _, end_s, free_s = event
        for rank in ranks:
            free[stage][rank] = free_s
            if work.talks or waits:
                exposed[stage, rank] += work.exposed_s(stage, op) + (free_s - end_s if waits else 0.0)
            if record:
                spans += _spans_of(event, rank, work.parts(stage, op))
        if op.kind == "B":
            hidden[stage] = max(hidden[stage], work.compute[stage]["B"][op.micro_batch])
    step_s = _end_of_step(plan, situation, np.array(free), exposed, hidden, spans if record else None)
    peaks = [[peak for peak, _ in peaks_of_stage(plan, stage)] for stage in range(shape[0])]
    memory = situation.costs.memory
    held = np.maximum(peaks, memory.update_bytes) + fixed_bytes(memory, plan.limits)
    spans.sort(key=lambda span: span[:2] + span[4:])
    return Simulation(step_s, work.busy_s(), exposed, _update_s(situation), held, tuple(spans))


class _Work:
    """Seconds of every pass of a plan."""

    def __init__(self, plan: StepPlan, situation: Situation) -> None:
        self._plan, self._at = plan, situation
        self.compute = _compute(plan, situation)
        """Seconds by stage, direction and micro-batch."""
        self._again = _forward_again(plan, situation.costs)
        layout, traffic = situation.layout, situation.traffic
        grouped = any(len(m.ranks) > 1 for m in (*plan.micro_batches, *plan.backward))
        self._moves = layout.tp > 1 or grouped or bool(layout.ep > 1 and traffic.expert_bytes_per_token)
        self._gathers = {k: gathering_s(traffic, situation.cluster, layout, n) for k, n in (("F", 1), ("B", 2))}
        self.talks = self._moves or self._gathers["F"] > 0
        """Whether passes hold communication at all."""
        self._links = [links_up(situation.cluster, layout, stage) for stage in range(plan.limits.num_stages - 1)]
        self._known: dict[tuple[int, Op], float] = {}

    def seconds(self, stage: int, op: Op) -> float:
        """Compute and exposed communication of a pass."""
        compute_s = self.compute[stage][op.kind][op.micro_batch]
        return compute_s + self.exposed_s(stage, op) if self.talks else compute_s

    def exposed_s(self, stage: int, op: Op) -> float:
        """Communication inside a pass that nothing hides."""
        if not self._moves:
            return self._gathers[op.kind]
        if (stage, op) not in self._known:
            self._known[stage, op] = self._gathers[op.kind] + self._moving_s(stage, op)
        return self._known[stage, op]

    def _moving_s(self, stage: int, op: Op) -> float:
        at, micro_batch = self._at, self._plan.passes(op.kind)[op.micro_batch]
        directions = [(at.costs.forward, 1)] if op.kind == "F" else [(at.costs.backward, 2)]
        if op.kind == "B" and op.micro_batch in self._again:
            directions.append((at.costs.forward, 1))
        return sum(
            exposed_s(at.traffic, at.cluster, at.layout, stage, micro_batch, cost, passes)
            for cost, passes in directions
        )

    def hand_over(self, stage: int, op: Op) -> float:
        """Between ``stage`` and the next, in either direction."""
        ranks = self._plan.passes(op.kind)[op.micro_batch].ranks
        slots = self._plan.slots[op.kind][op.micro_batch] / len(ranks)
        return self._links[stage][ranks[0]].send_s(slots * self._at.traffic.state_bytes_per_token)

    def parts(self, stage: int, op: Op) -> list[tuple[Kind, float]]:
        """What a pass consists of, in order; nothing that takes no time."""
        again = self._again.get(op.micro_batch, 0.0) if op.kind == "B" else 0.0
        own = self.compute[stage][op.kind][op.micro_batch] - again
        parts: list[tuple[Kind, float]] = [("R", again), (op.kind, own), ("C", self.exposed_s(stage, op))]
        return [part for part in parts if part[1] > 0]

    def busy_s(self) -> Floats:
        """Compute of every rank [stages, ranks]."""
        ranks = range(self._plan.limits.num_ranks)
        of_rank = [[(kind, i) for kind in _KINDS for i in self._plan.of_rank(rank, kind)] for rank in ranks]
        return np.array([[sum(seconds[kind][i] for kind, i in row) for row in of_rank] for seconds in self.compute])


def _compute(plan: StepPlan, situation: Situation) -> list[_Seconds]:
    """Costs are those of a mean stage: the last one has the output layer, which the others have not."""
    costs, stages = situation.costs, plan.limits.num_stages
    mean = dict(zip(_KINDS, pass_seconds(plan, costs), strict=True))
    if stages == 1 or not situation.head_frac:
        return [mean] * stages
    linear: dict[Literal["F", "B"], float] = {"F": costs.forward.token_s, "B": costs.backward.token_s}
    tokens = {
        kind: [n / len(m.ranks) for n, m in zip(plan.slots[kind], plan.passes(kind), strict=True)] for kind in _KINDS
    }

    def stage_of(more: float) -> _Seconds:
        return {
            kind: [s + more * linear[kind] * n for s, n in zip(mean[kind], tokens[kind], strict=True)]
            for kind in _KINDS
        }

    return [stage_of(-situation.head_frac)] * (stages - 1) + [stage_of(situation.head_frac * (stages - 1))]


def _forward_again(plan: StepPlan, costs: Costs) -> dict[int, float]:
    """Seconds of the forward inside each backward that runs one: replays, and all where layers are recomputed."""
    wanted = range(len(plan.passes("B"))) if costs.recompute else plan.replayed
    return {j: costs.micro_batch_s(plan.passes("B")[j])[0] for j in wanted}


def _spans_of(event: Event, rank: int, parts: list[tuple[Kind, float]]) -> list[Span]:
    spans, now = [], event.start_s
    for kind, seconds in parts:
        spans.append(Span(event.stage, rank, kind, event.op.micro_batch, now, now + seconds))
        now += seconds
    return spans


def _end_of_step(
    plan: StepPlan, situation: Situation, free: Floats, exposed: Floats, hidden: list[float], spans: list[Span] | None
) -> float:
    """Gradient sum of every stage, then the update of all: the end of the step. Adds to ``exposed`` and ``spans``."""
    traffic, layout = situation.traffic, situation.layout
    ends: list[tuple[float, float]] = []
    for stage, ready in enumerate(free.max(axis=1).tolist()):
        sum_s = gradient_sum_s(traffic, situation.cluster, layout, stage)
        if traffic.overlap_gradients and not plan.order and not plan.recompute:
            sum_s = max(0.0, sum_s - hidden[stage])
        exposed[stage] += sum_s
        ends.append((ready, ready + sum_s))
    update_s, begin = _update_s(situation), max(end for _, end in ends)
    for stage, (ready, end) in enumerate(ends):
        for rank in range(plan.limits.num_ranks) if spans is not None else ():
            found = [Span(stage, rank, "G", -1, ready, end), Span(stage, rank, "U", -1, begin, begin + update_s)]
            spans += [span for span in found if span.end_s > span.start_s]  # type: ignore[operator]
    return begin + update_s


def _update_s(situation: Situation) -> float:
    sharded = situation.traffic.sharding != "none"
    return situation.costs.update_s / (situation.layout.plane_size if sharded else 1)
