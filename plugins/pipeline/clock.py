"""Seconds of every pass at every stage, in tables that loops can read fast, and how long orders take by them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...core.costs.context import PlanningContext
from ...core.plan.order import DIRECTIONS, orders_of_stage
from ...core.plan.step_plan import Op, PassKind, StepPlan
from ...core.simulate.events import SecondsOf
from ...core.simulate.passes import PassTimes

Table = tuple[tuple[float, ...], ...]
"""``table[stage][number]`` [s]: of a pass, by the number of its micro-batch."""


class Clock(NamedTuple):
    """What passes take, communication inside them included, and how long their results travel [s]."""

    forward: Table
    backward: Table
    """With its weight gradients."""
    weights: Table
    """The part of a backward that may be a pass of its own; all zero where the host cannot split it."""
    up: Table
    """From the end of a forward at a stage to its arrival at the next; the last stage has none."""
    down: Table
    """From the end of a backward at a stage to its arrival at the stage before; row s is that of stage s + 1."""

    @property
    def num_stages(self) -> int:
        return len(self.forward)


_known: WeakKeyDictionary[StepPlan, tuple[PlanningContext, Clock]] = WeakKeyDictionary()


def clock_of(plan: StepPlan, context: PlanningContext) -> Clock:
    """The clock of a plan, whose order is not looked at. Worked out once for a plan."""
    known = _known.get(plan)
    if known is None or known[0] is not context:
        known = _known[plan] = context, _clock_of(plan, context)
    return known[1]


def reordered(plan: StepPlan, order: Sequence[Sequence[Op]]) -> StepPlan:
    """The plan in another order, with the clock that it has."""
    other = plan.revised(order=tuple(map(tuple, order)), merge=())
    if plan in _known:
        _known[other] = _known[plan]
    return other


def _clock_of(plan: StepPlan, context: PlanningContext) -> Clock:
    stages = range(plan.limits.num_stages)
    counts: dict[PassKind, int] = {"F": len(plan.micro_batches), "B": len(plan.passes("B"))}
    counts["W"] = counts["B"]
    splits = plan.limits.splits_backward
    # Only a plan that has W passes is told what they take.
    listed = tuple(Op("W", j) for j in range(counts["B"])) if splits else ()
    launched = tuple(Op(kind, j) for kind in DIRECTIONS for j in range(counts[kind]))
    times = PassTimes(replace(plan, order=((*launched, *listed),) * len(stages)), context)

    def rows(key: Callable[[int], Hashable], seconds: SecondsOf, kind: PassKind, count: int) -> Table:
        known: dict[Hashable, tuple[float, ...]] = {}
        for stage in stages[:count]:
            if key(stage) not in known:
                known[key(stage)] = tuple(seconds(stage, Op(kind, j)) for j in range(counts[kind]))
        return tuple(known[key(stage)] for stage in stages[:count])

    def moving(kind: PassKind) -> Table:
        return rows(times.hand_over.alike, times.hand_over, kind, len(stages) - 1)

    forward = rows(times.alike, times.seconds, "F", len(stages))
    none = ((0.0,) * counts["B"],) * len(stages)
    weights = rows(context.layers_at, times.seconds, "W", len(stages)) if splits else none

    def whole(stage: int, op: Op) -> float:
        return times.seconds(stage, op) + weights[stage][op.micro_batch]

    backward = rows(times.alike, whole, "B", len(stages))
    up = moving("F")
    return Clock(forward, backward, weights, up, moving("B") if plan.backward else up)


def passes_s(plan: StepPlan, context: PlanningContext) -> float:
    """When the last pass of a plan ends [s], which no step takes less than; it shares nothing and does not deadlock."""
    clock = clock_of(plan, context)
    rows = [orders_of_stage(plan, stage) for stage in range(clock.num_stages)]
    return max(end_of(ranks, clock) for ranks in zip(*rows, strict=True))


def end_of(orders: Sequence[Sequence[Op]], clock: Clock) -> float:
    """When the last stage has finished [s], by the rules of `core.simulate.events`.

    ``orders[stage]``: the passes of one plane rank, which shares none and does not deadlock.
    """
    last = clock.num_stages - 1
    at, free = [0] * (last + 1), [0.0] * (last + 1)
    split = [{j for kind, j in ops if kind == "W"} for ops in orders]
    came_up: list[dict[int, float]] = [{} for _ in orders]
    came_down: list[dict[int, float]] = [{} for _ in orders]
    up_free, down_free = [0.0] * (last + 1), [0.0] * (last + 1)
    ready = list(range(last, -1, -1))
    while ready:
        stage = ready.pop()
        ops, place, now = orders[stage], at[stage], free[stage]
        while place < len(ops):
            kind, j = ops[place]
            if kind == "F":
                if stage:
                    arrival = came_up[stage].get(j)
                    if arrival is None:
                        break
                    now = max(now, arrival)
                now += clock.forward[stage][j]
                if stage < last:
                    up_free[stage] = came_up[stage + 1][j] = max(now, up_free[stage]) + clock.up[stage][j]
            elif kind == "B":
                if stage < last:
                    arrival = came_down[stage].get(j)
                    if arrival is None:
                        break
                    now = max(now, arrival)
                now += clock.backward[stage][j] - (clock.weights[stage][j] if j in split[stage] else 0.0)
                if stage:
                    down_free[stage] = came_down[stage - 1][j] = max(now, down_free[stage]) + clock.down[stage - 1][j]
            else:
                now += clock.weights[stage][j]
            place += 1
        if place > at[stage]:
            ready += [s for s in (stage - 1, stage + 1) if 0 <= s <= last and s not in ready]
        at[stage], free[stage] = place, now
    return max(free)
