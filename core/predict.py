"""How long a plan takes, predicted: every pass of every micro-batch on its ranks, stage by stage.

Rules: a rank of a stage runs one pass at a time, in its order (the plan's, or the host's 1F1B over the launch order); a
micro-batch on several ranks starts when all are free; forward waits for the previous stage and backward for the next.
Where the trainer synchronises ranks at every micro-batch (equal counts), the k-th micro-batches of all ranks start
together. Left out: sends between stages, context-parallel traffic and the gradient reduction at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from .costs import Costs
from .laws import order_of_rank
from .workload import Op, StepPlan


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


def predict(plan: StepPlan, costs: Costs) -> Prediction:
    """Predict a lawful plan. ``costs`` are those of one stage (`Costs.of_stage`)."""
    passes = [costs.micro_batch_s(m) for m in plan.micro_batches]
    busy = [sum(sum(passes[i]) for i in plan.of_rank(rank)) for rank in range(plan.limits.num_ranks)]
    if plan.limits.num_stages > 1 or plan.order:
        step_s = _stages_s(plan, passes)
    elif plan.limits.equal_counts:
        rounds = zip(*(plan.of_rank(rank) for rank in range(plan.limits.num_ranks)), strict=True)
        step_s = sum(max(sum(passes[i]) for i in indices) for indices in rounds)
    else:
        step_s = _plane_s(plan, passes)
    return Prediction(step_s, tuple(busy))


def _plane_s(plan: StepPlan, passes: list[tuple[float, float]]) -> float:
    """One stage, forward and backward of a micro-batch in one go, groups meet in launch order."""
    free = [0.0] * plan.limits.num_ranks
    for micro_batch, seconds in zip(plan.micro_batches, passes, strict=True):
        end = max(free[r] for r in micro_batch.ranks) + sum(seconds)
        for r in micro_batch.ranks:
            free[r] = end
    return max(free)


def _stages_s(plan: StepPlan, passes: list[tuple[float, float]]) -> float:
    """Run the orders of all (stage, rank) against each other; every pass starts when its ranks and inputs are ready."""
    stages, ranks = range(plan.limits.num_stages), range(plan.limits.num_ranks)
    lists = {(s, r): list(order_of_rank(plan, s, r)) for s in stages for r in ranks}
    at = dict.fromkeys(lists, 0)
    free = dict.fromkeys(lists, 0.0)
    end: dict[tuple[int, Op], float] = {}
    ready = list(lists)
    while ready:
        stage, rank = ready.pop()
        if at[stage, rank] == len(lists[stage, rank]):
            continue
        op = lists[stage, rank][at[stage, rank]]
        members = plan.micro_batches[op.micro_batch].ranks
        neighbour = stage - 1 if op.kind == "F" else stage + 1
        inside = 0 <= neighbour < plan.limits.num_stages
        if inside and (neighbour, op) not in end:
            continue
        if any(at[stage, r] == len(lists[stage, r]) or lists[stage, r][at[stage, r]] != op for r in members):
            continue
        start = max([free[stage, r] for r in members] + ([end[neighbour, op]] if inside else []))
        end[stage, op] = start + passes[op.micro_batch][0 if op.kind == "F" else 1]
        for r in members:
            free[stage, r] = end[stage, op]
            at[stage, r] += 1
        ready += [(s, r) for r in members for s in (stage, stage - 1, stage + 1) if 0 <= s < plan.limits.num_stages]
    return max(free.values())
