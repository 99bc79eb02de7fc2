"""Weight gradients as passes of their own, run where a pipeline stage would wait (W of Qi et al., arXiv 2401.10241).

A backward that leaves its weight gradients for later sends the gradient of its input sooner, and what it left fills
waits: those of the drain above all, when a stage has no forwards any more. Forwards and backwards keep the order that
the plan gives them; stages run against each other in simulated time, and a stage with something left to do

    runs the next pass        as soon as that has arrived and what waits leaves it memory,
    runs the oldest W         while the next pass has not arrived, or to make room for it,
    runs all W that are left  after its last pass.

Memory is what the plan holds in each pass (`core.costs.memory`) plus ``deferred`` bytes from every split backward to
its W. Several caps are tried: what the fullest stage holds without W passes (ZB-H1, section 2.2), some times of it, and
what the device has; the last of them fills most waits, and a smaller one is taken where that is as fast. A backward
that finds no memory for what it would leave is not split. O(passes x stages x log) a cap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ...core.costs.context import PlanningContext
from ...core.costs.memory import fixed_bytes
from ...core.plan.order import orders_of_stage
from ...core.plan.rounds import Round
from ...core.plan.step_plan import Op, StepPlan
from .clock import Clock, clock_of, end_of, reordered
from .elastic import clock_of_rounds, groups_in_rounds, teams_of
from .memory_rows import levels_of

TRIES = ((0.0, 4), (0.0, None), (0.5, None))
"""Patience, and passes of a stage that may leave or run a W: the last so many times the number of stages, or all.

A W starts while a stage waits if the wait is known to last ``patience`` of it: it may make the next pass late. Any wait
is best where stages run ahead (`elastic`), longer ones where they do not. With many micro-batches that run ahead only
the drain has waits worth filling."""
TIMES = (2.0, 4.0)
"""Caps tried besides the least and the greatest: so many times what the fullest stage holds without W passes."""

ALIKE = 0.001
"""Share of the step within which every rank takes the fewest W passes: what is held for them is written and read."""
SLACK = 0.003
"""Share of the step by which a plan may be slower than the fastest for holding less."""
MEMORY_WORTH = 0.07
"""What a per cent less memory is worth, in per cent of the step: none is slower for next to nothing."""

ROUNDING = 1e-9
"""Share of a memory cap that is left, as sums of bytes in another order differ in their last digits."""


def worth(seconds: float, held_bytes: float) -> float:
    """What is least for the plan that is to be taken of those within `SLACK` of the fastest."""
    return float(seconds * max(1.0, held_bytes) ** MEMORY_WORTH)


class Placing:
    """W passes of an ordered plan, whose passes may hold ``budget_bytes``."""

    def __init__(self, plan: StepPlan, context: PlanningContext, budget_bytes: float, splits: bool) -> None:
        limits, memory = plan.limits, plan.limits.memory
        self.plan = plan
        self._round_of = _rounds_of_shared(plan)
        self._clock, levels = clock_of(plan, context), levels_of(plan)
        tokens = [slots / len(m.ranks) for slots, m in zip(plan.slots["B"], plan.passes("B"), strict=True)]
        left_bytes = [limits.at(stage).memory.deferred_bytes_per_token for stage in range(limits.num_stages)]
        deferred = [[each * num_bytes for each in tokens] for num_bytes in left_bytes]
        rows = [orders_of_stage(plan, stage) for stage in range(limits.num_stages)]
        if self._round_of:
            of_each = [self._round_of[i] for i in range(len(plan.micro_batches))]
            self._clock = clock_of_rounds(self._clock, of_each)
            deferred = [[max(own[i] for i in round_) for round_ in of_each] for own in deferred]
            rows, levels = _of_teams(plan, rows, levels, self._round_of)
        self._lines = [
            _Line([row[line] for row in rows], [level[line] for level in levels], deferred, memory.pass_bytes)
            for line in range(len(rows[0]))
        ]
        self._budget_bytes = budget_bytes
        self._fixed_bytes = fixed_bytes(memory, limits)
        hindered = (plan.shared and not self._round_of) or limits.all_in_step or not splits or limits.num_stages == 1
        self._hindered = hindered or not plan.order or any(plan.split)
        """Without an order, where the host cannot split backwards, and where ranks all run in step or share
        micro-batches that are in no rounds, there are no W passes. A plan that has some keeps them."""
        self.fits = max(line.fullest_bytes for line in self._lines) <= budget_bytes

    @cached_property
    def _freest(self) -> list[_Moves]:
        """With as many W passes as the device has memory for, of each line."""
        return [_filled(line, self._clock, 0.0, math.inf, self._budget_bytes) for line in self._lines]

    @cached_property
    def _kept(self) -> list[_Moves]:
        """As it is, of each line."""
        return [_Moves(one.orders, end_of(one.orders, self._clock), one.fullest_bytes) for one in self._lines]

    @cached_property
    def end_s(self) -> float:
        """When the last pass ends [s], about: with W passes in all waits that they can fill."""
        if self._hindered or not self.fits:
            return max(moves.end_s for moves in self._kept)
        return max(moves.end_s for moves in self._freest)

    def placed(self) -> StepPlan:
        """The plan with W passes on those ranks of the plane that would end the step later without them, as predicted;
        the plan as it is where none are to be placed, and where it does not fit."""
        if self._hindered or not self.fits:
            return self.plan
        choices = [self._choices(line) for line in range(len(self._lines))]
        least_s = max(min(moves.end_s for moves in each) for each in choices)
        orders: list[list[Op]] = [[] for _ in range(self.plan.limits.num_stages)]
        for each in choices:
            for ops, more in zip(orders, self._chosen(each, least_s).orders, strict=True):
                ops += [Op(kind, i) for kind, first in more for i in self._round_of.get(first, (first,))]
        splits = any(op.kind == "W" for ops in orders for op in ops)
        return reordered(self.plan, orders) if splits else self.plan

    def _choices(self, number: int) -> list[_Moves]:
        """The orders of a line as they are and with W passes, under the caps up to the device's."""
        line, clock, freest = self._lines[number], self._clock, self._freest[number]
        most, least_bytes = min(self._budget_bytes, freest.held_bytes), line.fullest_bytes
        tails = [(patience, math.inf if tail is None else tail * clock.num_stages) for patience, tail in TRIES]
        choices = [self._kept[number], *(_filled(line, clock, *each, least_bytes) for each in tails)]
        if most > least_bytes:
            between = (times * least_bytes for times in TIMES if times * least_bytes < most)
            choices += [_filled(line, clock, 0.0, math.inf, cap) for cap in between]
            choices += [freest, _filled(line, clock, 0.5, math.inf, self._budget_bytes)]
        return choices

    def _chosen(self, choices: list[_Moves], least_s: float) -> _Moves:
        # Half of it: the choice among plans has as much again.
        near = [moves for moves in choices if moves.end_s <= least_s * (1 + SLACK / 2)]
        worths = [worth(max(moves.end_s, least_s), self._fixed_bytes + moves.held_bytes) for moves in near]
        alike = [one for one, its in zip(near, worths, strict=True) if its <= min(worths) * (1 + ALIKE)]
        return min(alike, key=lambda moves: sum(map(len, moves.orders)))


class _Moves(NamedTuple):
    """Where the passes of a line go."""

    orders: list[list[Op]]
    """At each stage."""
    end_s: float
    held_bytes: float
    """The most at any stage."""


class _Line(NamedTuple):
    """A rank of the plane, or ranks that share micro-batches: these have the first of each round, as long as that."""

    orders: list[list[Op]]
    levels: list[list[float]]
    """The most that is held in each of them [bytes]."""
    deferred: list[list[float]]
    """What each backward leaves for its W at each stage [bytes]."""
    pass_bytes: float
    """What a W takes while it runs."""

    @property
    def fullest_bytes(self) -> float:
        return max((max(levels) for levels in self.levels if levels), default=0.0)


def _rounds_of_shared(plan: StepPlan) -> dict[int, Round]:
    """The round of each micro-batch where ranks share some, and every stage runs rounds; else nothing."""
    groups = groups_in_rounds(plan) if plan.shared and plan.order and not plan.backward else None
    round_of = {i: round_ for rounds in groups or () for round_ in rounds for i in round_}
    for ops in plan.order if round_of else ():
        if list(ops) != [op._replace(micro_batch=i) for op in _firsts(ops, round_of) for i in round_of[op.micro_batch]]:
            return {}
    return round_of


def _firsts(ops: Sequence[Op], round_of: dict[int, Round]) -> list[Op]:
    return [op for op in ops if round_of[op.micro_batch][0] == op.micro_batch]


def _of_teams(
    plan: StepPlan, rows: list[list[list[Op]]], levels: list[list[list[float]]], round_of: dict[int, Round]
) -> tuple[list[list[list[Op]]], list[list[list[float]]]]:
    """By stage and team the passes of the first of every round, and the most that a rank holds in each round."""
    teams = teams_of(plan)
    team_of = {i: number for number, ranks in enumerate(teams) for rank in ranks for i in plan.of_rank(rank)}
    orders: list[list[list[Op]]] = []
    held: list[list[list[float]]] = []
    for ops, of_ranks, of_levels in zip(plan.order, rows, levels, strict=True):
        most: dict[Op, float] = {}
        for op, held_bytes in zip(chain.from_iterable(of_ranks), chain.from_iterable(of_levels), strict=True):
            most[op] = max(most.get(op, 0.0), held_bytes)
        orders.append([[] for _ in teams])
        held.append([[] for _ in teams])
        for op in _firsts(ops, round_of):
            orders[-1][team_of[op.micro_batch]].append(op)
            fullest = max(most[op._replace(micro_batch=i)] for i in round_of[op.micro_batch])
            held[-1][team_of[op.micro_batch]].append(fullest)
    return orders, held


def _filled(line: _Line, clock: Clock, patience: float, tail: float, cap_bytes: float) -> _Moves:
    """The orders with W passes among the last ``tail`` passes of every stage, where no stage holds more than a cap."""
    last = clock.num_stages - 1
    cap, most = (1 - ROUNDING) * cap_bytes, line.fullest_bytes
    out: list[list[Op]] = [[] for _ in line.orders]
    at, free, held = [0] * (last + 1), [0.0] * (last + 1), [0.0] * (last + 1)
    left: list[deque[int]] = [deque() for _ in line.orders]
    tables = {"F": (clock.forward, clock.up, 1), "B": (clock.backward, clock.down, -1)}
    # By direction, stage and micro-batch, when what a pass starts from arrives, as far as that is known.
    arrivals: dict[str, list[list[float | None]]] = {k: [[None] * len(tables[k][0][0]) for _ in out] for k in tables}
    arrivals["F"][0], arrivals["B"][last] = [0.0] * len(clock.forward[0]), [0.0] * len(clock.weights[0])
    link_free = {kind: [0.0] * (last + 1) for kind in tables}
    events = [(0.0, stage) for stage in range(last + 1)]
    while events:
        now, stage = heapq.heappop(events)
        if now < free[stage]:
            continue
        waiting, ops, place = left[stage], line.orders[stage], at[stage]
        weights, deferred = clock.weights[stage], line.deferred[stage]
        if place == len(ops):
            out[stage] += [Op("W", j) for j in waiting]
            free[stage] += sum(weights[j] for j in waiting)
            waiting.clear()
            continue
        kind, j = op = ops[place]
        forward = kind == "F"
        table, moving, ahead = tables[kind]
        arrival = arrivals[kind][stage][j]
        here = arrival is not None and arrival <= now
        level, needs = line.levels[stage][place] + held[stage], line.pass_bytes if forward else deferred[j]
        lacks = level + needs > cap
        if waiting and (lacks or not here):
            if arrival is None:  # its neighbour has it still to run
                source = stage - ahead
                arrival = max(now, free[source]) + table[source][j] + moving[min(stage, source)][j]
                arrival -= 0.0 if forward else clock.weights[source][j]
            if here or arrival - now >= patience * weights[waiting[0]]:
                done = waiting.popleft()
                out[stage].append(Op("W", done))
                held[stage] -= deferred[done]
                free[stage] = now + weights[done]
                heapq.heappush(events, (free[stage], stage))
                continue
        if not here:
            continue
        splits = not forward and not lacks and len(ops) - place <= tail
        out[stage].append(op)
        most = max(most, level + needs if splits else level)
        at[stage] = place + 1
        free[stage] = now = now + table[stage][j] - (weights[j] if splits else 0.0)
        if splits:
            waiting.append(j)
            held[stage] += deferred[j]
        if 0 <= (target := stage + ahead) <= last:
            sent = max(now, link_free[kind][stage]) + moving[min(stage, target)][j]
            link_free[kind][stage] = arrivals[kind][target][j] = sent
            if sent > free[target]:
                heapq.heappush(events, (sent, target))
        heapq.heappush(events, (now, stage))
    return _Moves([_joined(out[0]), *out[1:]], max(free), most)


def _joined(ops: list[Op]) -> list[Op]:
    """The first stage sends no gradient: a W right after its backward is no pass of its own there."""
    behind = [None, *ops]
    return [op for op, before in zip(ops, behind, strict=False) if op.kind != "W" or before != Op("B", op.micro_batch)]
