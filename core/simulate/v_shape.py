"""In which order a device takes the passes of its two stages (`Limits.v_shape`), where a plan has lists of stages only.

Let every stage have a device of its own for a moment, on which a forward and a W take one unit of time and a backward
two. Each pass starts later than those that it needs, so the passes of both stages by these starts are an order in which
nothing waits in a circle. O(passes x stages).
"""

from __future__ import annotations

from dataclasses import replace

from ..plan.order import orders_of_stage
from ..plan.step_plan import Op, StepPlan
from .events import play

_UNITS = {"F": 1.0, "B": 2.0, "W": 1.0}


def merged(plan: StepPlan) -> StepPlan:
    """The plan with an order of every stage and a merge for every device; as it is where it has them or needs none."""
    limits = plan.limits
    if not limits.v_shape or plan.merge or plan.shared or not plan.micro_batches:
        return plan
    stages = range(limits.num_stages)
    order = plan.order or tuple(tuple(op for row in orders_of_stage(plan, s) for op in row) for s in stages)
    apart = plan.revised(order=order, limits=replace(limits, v_shape=False))
    passes = sorted((event.start_s, event.stage, event.op) for event in play(apart, lambda _, op: _UNITS[op.kind]))
    return with_passes(plan, [(stage, op) for _, stage, op in passes])


def with_passes(plan: StepPlan, passes: list[tuple[int, Op]]) -> StepPlan:
    """The plan with these passes, each with its stage, in the order in which devices run them."""
    limits = plan.limits
    order: list[list[Op]] = [[] for _ in range(limits.num_stages)]
    merge: list[list[int]] = [[] for _ in range(limits.num_devices)]
    for stage, op in passes:
        order[stage].append(op)
        merge[limits.device_of_stage(stage)].append(stage)
    return plan.revised(order=tuple(map(tuple, order)), merge=tuple(map(tuple, merge)))
