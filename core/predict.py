"""How long a plan takes, predicted: every pass of every micro-batch on its ranks, stage by stage.

Rules: a rank of a stage runs one pass at a time, in its order (the plan's, or the host's 1F1B over the launch order); a
micro-batch on several ranks starts when all are free; forward waits for the previous stage and backward for the next.
Where the trainer synchronises ranks at every micro-batch (equal counts), the k-th micro-batches of all ranks start
together. Left out: sends between stages, context-parallel traffic and the gradient reduction at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .costs import Costs
from .order import orders_of_stage
from .workload import MicroBatch, Op, StepPlan

_BOTH: tuple[Literal["F", "B"], ...] = ("F", "B")


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one step."""

    step_s: float
    """When the last rank has finished."""
    busy_s: tuple[float, ...]
    """Busy seconds of each plane rank on one stage."""

    @property
    def imbalance(self) -> float:
        """Busiest rank over mean rank; 1.0 is even."""
        mean = sum(self.busy_s) / len(self.busy_s)
        return max(self.busy_s) / mean if mean else 1.0

    @property
    def bubble_frac(self) -> float:
        """Idle share of all ranks and stages, from the step's start to its end."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


Passes = tuple[list[float], list[float]]
"""Seconds of each micro-batch of the forward and of the backward."""


def predict(plan: StepPlan, costs: Costs, passes: Passes | None = None) -> Prediction:
    """Predict a lawful plan. ``costs`` are those of one stage (`Costs.of_stage`); ``passes`` spares `pass_seconds`."""
    forward, backward = passes or pass_seconds(plan, costs)
    busy = [
        sum(forward[i] for i in plan.of_rank(rank)) + sum(backward[j] for j in plan.of_rank(rank, "B"))
        for rank in range(plan.limits.num_ranks)
    ]
    if plan.limits.equal_counts:
        step_s = _rounds_s(plan, forward, backward)
    elif plan.limits.num_stages > 1:
        step_s = _stages_s(plan, forward, backward)
    else:
        step_s = _plane_s(plan, forward, backward)
    return Prediction(step_s, tuple(busy))


def pass_seconds(plan: StepPlan, costs: Costs) -> Passes:
    """Seconds of each micro-batch of the forward and of the backward on each of its ranks, replays included."""
    both = [costs.micro_batch_s(m) for m in plan.micro_batches]
    back = [costs.micro_batch_s(m) for m in plan.backward] if plan.backward else both
    backward = [seconds for _, seconds in back]
    for j in () if costs.recompute else plan.replayed:
        backward[j] += back[j][0]
    return [seconds for seconds, _ in both], backward


def micro_batch_imbalance(plan: StepPlan, costs: Costs, passes: Passes | None = None) -> tuple[float, float]:
    """Costliest micro-batch over mean, forward and backward (replays included, dummies and launches left out)."""
    forward, backward = passes or pass_seconds(plan, costs)
    return (
        _over_mean(forward, plan.passes("F"), costs.forward.launch_s),
        _over_mean(backward, plan.passes("B"), costs.backward.launch_s),
    )


def _over_mean(seconds: list[float], micro_batches: tuple[MicroBatch, ...], launch_s: float) -> float:
    busy = [s - launch_s for s, m in zip(seconds, micro_batches, strict=True) if m.slices]
    total = sum(busy)
    return max(busy) * len(busy) / total if total else 1.0


def _rounds_s(plan: StepPlan, forward: list[float], backward: list[float]) -> float:
    """Ranks meet in every pass: the k-th forwards of all ranks take the time of the slowest, and so do backwards."""
    if not plan.order:  # forward and backward of a micro-batch in one go
        rounds = zip(*map(plan.of_rank, range(plan.limits.num_ranks)), strict=True)
        return float(sum(max(forward[i] + backward[i] for i in indices) for indices in rounds))
    total = 0.0
    for kind, seconds in (("F", forward), ("B", backward)):
        rows = [[seconds[op.micro_batch] for op in ops if op.kind == kind] for ops in orders_of_stage(plan, 0)]
        total += sum(max(column) for column in zip(*rows, strict=True))
    return total


def _plane_s(plan: StepPlan, forward: list[float], backward: list[float]) -> float:
    """One stage: every rank runs its passes one after the other; groups meet in launch order."""
    free = [0.0] * plan.limits.num_ranks
    ops = plan.order[0] if plan.order else [Op(kind, i) for i in range(len(plan.micro_batches)) for kind in _BOTH]
    for op in ops:
        ranks = plan.passes(op.kind)[op.micro_batch].ranks
        end = max(free[r] for r in ranks) + (forward if op.kind == "F" else backward)[op.micro_batch]
        for r in ranks:
            free[r] = end
    return max(free)


def _stages_s(plan: StepPlan, forward: list[float], backward: list[float]) -> float:
    """Run the orders of all (stage, rank) against each other; every pass starts when its ranks and inputs are ready."""
    lists = {(s, r): ops for s in range(plan.limits.num_stages) for r, ops in enumerate(orders_of_stage(plan, s))}
    at = dict.fromkeys(lists, 0)
    free = dict.fromkeys(lists, 0.0)
    end: dict[tuple[int, Op], float] = {}
    ready = list(lists)
    while ready:
        stage, rank = ready.pop()
        if at[stage, rank] == len(lists[stage, rank]):
            continue
        op = lists[stage, rank][at[stage, rank]]
        members = plan.passes(op.kind)[op.micro_batch].ranks
        neighbour = stage - 1 if op.kind == "F" else stage + 1
        inside = 0 <= neighbour < plan.limits.num_stages
        if inside and (neighbour, op) not in end:
            continue
        if any(at[stage, r] == len(lists[stage, r]) or lists[stage, r][at[stage, r]] != op for r in members):
            continue
        start = max([free[stage, r] for r in members] + ([end[neighbour, op]] if inside else []))
        end[stage, op] = start + (forward if op.kind == "F" else backward)[op.micro_batch]
        for r in members:
            free[stage, r] = end[stage, op]
            at[stage, r] += 1
        ready += [(s, r) for r in members for s in (stage, stage - 1, stage + 1) if 0 <= s < plan.limits.num_stages]
    return max(free.values())
