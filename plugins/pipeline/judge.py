"""What candidates come to, by the simulator, and which of some drafts is best once they have been made to fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.simulate.passes import PassTimes
from ...core.simulate.step import simulate
from .clock import passes_s
from .config import PipelineConfig


class Judged(NamedTuple):
    plan: StepPlan
    step_s: float
    held_bytes: float
    """The most that a rank of any stage holds, weights included."""
    missing_bytes: float
    """By how much that is too much; not positive where it fits."""
    bubble_frac: float

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0


def judged(plan: StepPlan, context: PlanningContext) -> Judged:
    outcome = simulate(plan, context, record=False)
    memory = context.costs.memory
    room = activation_budget_bytes(context.cluster, memory, plan.limits)
    if math.isinf(plan.limits.max_activation_bytes):  # no plan makes the update smaller
        room = max(room, memory.update_bytes)
    missing = float(outcome.activation_bytes.max()) - room
    return Judged(plan, outcome.step_s, float(outcome.peak_bytes.max()), missing, outcome.bubble_frac)


def keeping_all(plan: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """With nothing recomputed where plans may say so, whatever the recipe recomputes."""
    if not context.costs.recompute or config.recompute == "off" or plan.backward:
        return plan
    return plan.revised(recompute=((0,) * len(plan.micro_batches),) * plan.limits.num_stages)


def best_of(
    drafts: Iterable[StepPlan],
    order: Callable[[StepPlan], StepPlan],
    finish: Callable[[StepPlan], StepPlan],
    context: PlanningContext,
    bar_s: float = math.inf,
) -> Judged | None:
    """The fastest draft that fits, ordered, and finished where it did not fit; the least too large where none does.

    ``order`` gives a draft its order of passes, ``finish`` makes it fit, and neither makes it compute less. None where
    no draft takes less than ``bar_s``, or `finish` refuses all with an EvenloadError.
    """
    # The busiest rank's own work is quickly known, and no order takes less.
    hopeful = [one for one in drafts if bar_s == math.inf or PassTimes(one, context).busy_s().max() < bar_s]
    tried = [one for one in map(order, hopeful) if bar_s == math.inf or passes_s(one, context) < bar_s]
    found: list[Judged] = []
    for draft in sorted((judged(one, context) for one in tried), key=lambda one: one.step_s):
        if draft.step_s >= min([bar_s, *(one.step_s for one in found if one.fits)]):
            break
        if not draft.fits:
            try:
                draft = judged(finish(draft.plan), context)
            except EvenloadError:
                continue
        found.append(draft)
    return min(found, key=lambda one: (max(0.0, one.missing_bytes), one.step_s), default=None)
