"""Weight gradients as passes of their own, run where a pipeline stage would wait (W of Qi et al., arXiv 2401.10241).

A backward that leaves its weight gradients for later sends the gradient of its input sooner, and what it left fills
waits: those of the drain above all, when a stage has no forwards any more. Forwards and backwards keep the order that
the plan gives them; stages run against each other in simulated time, and a stage with something left to do

    runs the next pass        as soon as that has arrived and what waits leaves it memory,
    runs the oldest W         while the next pass has not arrived, or to make room for it,
    runs all W that are left  after its last pass.

Memory is what the plan holds in each pass (`core.costs.memory`) plus ``deferred`` bytes from every split backward to
its W. No stage may hold more than the fullest one does without W passes, so a pipeline that fits still fits (ZB-H1,
section 2.2, has the same bound). A backward that finds no room for what it would leave is not split. O(passes x stages
x log).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

from ...core.costs.context import PlanningContext
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import Op, StepPlan
from .clock import Clock, clock_of, end_of
from .memory_rows import levels_of

TRIES = ((0.0, 4), (0.0, None), (0.5, None))
"""Patience, and passes of a stage that may leave or run a W: the last so many times the number of stages, or all.

A W starts while a stage waits if the wait is known to last ``patience`` of it: it may make the next pass late. Any wait
is best where stages run ahead (`elastic`), longer ones where they do not. With many micro-batches that run ahead only
the drain has waits worth filling."""

ALIKE = 0.001
"""Share of the step within which every rank takes the fewest W passes: what is held for them is written and read."""

ROUNDING = 1e-9
"""Share of a memory cap that is left, as sums of bytes in another order differ in their last digits."""


def placed(plan: StepPlan, context: PlanningContext) -> StepPlan:
    """The plan with W passes on those ranks of the plane that would end the step later without them, as predicted.

    Unchanged without an order, where the host cannot split backwards, and where ranks share micro-batches or all run
    in step.
    """
    limits = plan.limits
    hindered = plan.shared or limits.all_in_step or not limits.splits_backward
    if hindered or not plan.order or limits.num_stages == 1 or any(plan.split):
        return plan
    clock = clock_of(plan, context)
    rows, levels = [orders_of_stage(plan, stage) for stage in range(limits.num_stages)], levels_of(plan)
    memory = limits.memory
    deferred = [slots * memory.deferred_bytes_per_token for slots in plan.slots["B"]]
    lines = [
        _Line([row[rank] for row in rows], [level[rank] for level in levels], deferred, memory.pass_bytes)
        for rank in range(limits.num_ranks)
    ]
    tries = [_tries(line, clock) for line in lines]
    least_s = max(min(end_s for _, end_s in each) for each in tries)
    orders: list[list[Op]] = [[] for _ in rows]
    for each in tries:
        near = [moves for moves, end_s in each if end_s <= least_s * (1 + ALIKE)]
        for ops, more in zip(orders, min(near, key=lambda moves: sum(map(len, moves))), strict=True):
            ops += more
    splits = any(op.kind == "W" for ops in orders for op in ops)
    return plan.revised(order=tuple(map(tuple, orders))) if splits else plan


class _Line(NamedTuple):
    orders: list[list[Op]]
    levels: list[list[float]]
    """The most that is held in each of them [bytes]."""
    deferred: list[float]
    """What each backward leaves for its W [bytes]."""
    pass_bytes: float
    """What a W takes while it runs."""


def _tries(line: _Line, clock: Clock) -> list[tuple[list[list[Op]], float]]:
    """The orders as they are and with W passes, each with its end [s]."""
    tails = [(patience, math.inf if tail is None else tail * clock.num_stages) for patience, tail in TRIES]
    return [(line.orders, end_of(line.orders, clock)), *(_filled(line, clock, *each) for each in tails)]


def _filled(line: _Line, clock: Clock, patience: float, tail: float) -> tuple[list[list[Op]], float]:
    """The orders with W passes among the last ``tail`` passes of every stage, and when the last stage ends [s]."""
    last = clock.num_stages - 1
    cap = (1 - ROUNDING) * max((max(levels) for levels in line.levels if levels), default=0.0)
    out: list[list[Op]] = [[] for _ in line.orders]
    at, free, held = [0] * (last + 1), [0.0] * (last + 1), [0.0] * (last + 1)
    left: list[deque[int]] = [deque() for _ in line.orders]
    arrivals: list[dict[Op, float]] = [{} for _ in line.orders]
    link_free = {kind: [0.0] * (last + 1) for kind in "FB"}
    events = [(0.0, stage) for stage in range(last + 1)]
    while events:
        now, stage = heapq.heappop(events)
        if now < free[stage]:
            continue
        waiting = left[stage]
        if at[stage] == len(line.orders[stage]):
            for j in waiting:
                out[stage].append(Op("W", j))
                free[stage] += clock.weights[j]
            waiting.clear()
            continue
        op = line.orders[stage][at[stage]]
        kind, j = op
        forward = kind == "F"
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        table, moving = (clock.forward, clock.up) if forward else (clock.backward, clock.down)
        arrival = arrivals[stage].get(op) if 0 <= source <= last else 0.0
        here = arrival is not None and arrival <= now
        if arrival is None:  # its neighbour has it still to run
            arrival = max(now, free[source]) + table[source][j] + moving[min(stage, source)][j]
            arrival -= 0.0 if forward else clock.weights[j]
        needs = line.pass_bytes if forward else line.deferred[j]
        lacks = line.levels[stage][at[stage]] + held[stage] + needs > cap
        if waiting and (lacks if here else arrival - now >= patience * clock.weights[waiting[0]]):
            done = waiting.popleft()
            out[stage].append(Op("W", done))
            held[stage] -= line.deferred[done]
            free[stage] = now + clock.weights[done]
        elif here:
            splits = not forward and not lacks and len(line.orders[stage]) - at[stage] <= tail
            out[stage].append(op)
            at[stage] += 1
            free[stage] = now + table[stage][j] - (clock.weights[j] if splits else 0.0)
            if splits:
                waiting.append(j)
                held[stage] += line.deferred[j]
            if 0 <= target <= last:
                sent = max(free[stage], link_free[kind][stage]) + moving[min(stage, target)][j]
                link_free[kind][stage] = arrivals[target][op] = sent
                if sent > free[target]:
                    heapq.heappush(events, (sent, target))
        else:
            continue
        heapq.heappush(events, (free[stage], stage))
    return [_joined(out[0]), *out[1:]], max(free)


def _joined(ops: list[Op]) -> list[Op]:
    """The first stage sends no gradient: a W right behind its backward is no pass of its own there."""
    behind = [None, *ops]
    return [op for op, before in zip(ops, behind, strict=False) if op.kind != "W" or before != Op("B", op.micro_batch)]
