"""Orders of a pipeline whose devices have two stages each, in a V (ZBV; Qi et al., arXiv 2405.15362).

Device d of P has stages d and 2P - 1 - d, so half forwards fill the pipeline, and the last stage is where the first is.
Forwards and backwards have the orders of `elastic`; which pass a device runs next is found by playing all devices
against each other in simulated time:

    of the passes that have arrived the first by a list of preferences, if memory holds it,
    the oldest weight gradients (W) while nothing has arrived, or to make room for those that a backward would leave

The lists of preferences name forward and backward at the earlier and the later stage, one or the other kind by turns or
not, and say whether a W may make the next pass late. Memory: what the device holds and what the later stages will keep
of micro-batches whose earlier stage has run; a forward that the next backward needs runs whatever is held. A play ends
early when it takes longer than a known one. All are tried on the chunks that two of them find fastest. The simulator
has the last word: where it counts more bytes, the play is run again under as many less. O(passes x stages x log) each.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...core.costs.context import PlanningContext
from ...core.costs.memory import peaks_of_stage
from ...core.plan.step_plan import Op, PassKind, StepPlan
from ...core.simulate.v_shape import with_passes
from .chunks import least_s
from .clock import Clock, clock_of
from .elastic import Lines, kept_bytes, lines_of_rounds
from .weights import ROUNDING

F, B = 0, 1
KINDS: tuple[PassKind, PassKind] = ("F", "B")
EARLIER, LATER = 0, 1


class Rule(NamedTuple):
    """How a device chooses among what has arrived."""

    first: tuple[tuple[int, int], ...]
    """Kinds and which stage of the device, first ones first."""
    alternates: bool
    """Forwards and backwards in turn where both have arrived."""
    patience: float
    """A W starts while a device waits if the wait is known to last so much of it."""

    def after(self, kind: int) -> list[tuple[int, int]]:
        """The choices after a pass of this kind."""
        return sorted(self.first, key=lambda one: one[0] == kind) if self.alternates else list(self.first)


_BACKWARDS, _FORWARDS = ((B, LATER), (B, EARLIER)), ((F, LATER), (F, EARLIER))
RULES = (
    Rule((*_FORWARDS, *_BACKWARDS), False, 0.0),
    Rule((*_BACKWARDS, *_FORWARDS), True, 0.0),
    Rule((*_FORWARDS, *_BACKWARDS), False, 1.0),
    Rule((*_BACKWARDS[::-1], *_FORWARDS), True, 0.0),
)
"""Of 16, those that find the best orders; others added nothing (docs/log.md)."""
FIRST = 2
"""So many of them compare chunks: the best for steps that open with small chunks, and for others."""
NEAR = 0.02
"""Share of the least time by which a plan may exceed it by the first rules,"""
FINALISTS = 2
"""and so many of them are played by all."""
TIGHTENED = 4
"""Times that the memory is lowered where the simulator counts more than a play."""


class Passes(NamedTuple):
    """The passes of a plane rank, by the start of each, and when the last one ends [s]."""

    ops: list[tuple[int, Op]]
    end_s: float


class Playing:
    """Micro-batches of a plan without an order, on devices with two stages."""

    def __init__(self, plan: StepPlan, context: PlanningContext, splits: bool) -> None:
        limits = plan.limits
        self.plan, clock = plan, clock_of(plan, context)
        kept = [kept_bytes(plan, stage) for stage in range(limits.num_stages)]
        left = [slots * limits.memory.deferred_bytes_per_token if splits else math.inf for slots in plan.slots["B"]]
        rows = [plan.of_rank(rank) for rank in range(limits.num_ranks)]
        self._lines = [_Line(lines_of_rounds(plan, [(i,) for i in row]), row, clock, kept, left) for row in rows]
        self.end_s = math.inf
        """When the last pass ends, in the order that was played last [s]."""

    @property
    def least_s(self) -> float:
        """No order takes less [s]."""
        return max(max(line.busy_s) for line in self._lines)

    def ordered(self, cap_bytes: float, bar_s: float = math.inf, *, thorough: bool = False) -> StepPlan | None:
        """The plan in the fastest order of each rank, by all rules or by the first ones alone; None where it takes
        ``bar_s`` or longer."""
        rules = RULES if thorough else RULES[:FIRST]
        chosen = [line.fastest(rules, cap_bytes, bar_s) for line in self._lines]
        ranks = [one for one in chosen if one]
        if len(ranks) < len(chosen):
            return None
        self.end_s = max(one.end_s for one in ranks)
        return with_passes(self.plan, [op for one in ranks for op in _joined(one.ops)])


def fastest(
    drafts: Iterable[StepPlan], context: PlanningContext, budget_bytes: float, splits: bool
) -> Iterator[StepPlan]:
    """The fastest of these plans, ordered, most promising first; each holds what passes may, if that can be had.

    ``drafts``: micro-batches without an order. ``splits``: backwards may leave weight gradients to a W.
    """
    played: list[Playing] = []
    bar_s = math.inf
    for _, draft in sorted(((least_s(one, context), one) for one in drafts), key=lambda one: one[0]):
        if least_s(draft, context) >= bar_s or (one := Playing(draft, context, splits)).least_s >= bar_s:
            continue
        if one.ordered(budget_bytes, bar_s * (1 + NEAR)):
            played.append(one)
            bar_s = min(bar_s, one.end_s)
    for one in sorted(played, key=lambda one: one.end_s)[:FINALISTS]:
        cap_bytes = budget_bytes
        for _ in range(TIGHTENED):
            plan = one.ordered(cap_bytes, thorough=True)
            if plan is None:
                break
            over = (
                max(peak for s in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, s)) - budget_bytes
            )
            if over <= 0:
                yield plan
                break
            cap_bytes -= 1.05 * over


def _joined(ops: list[tuple[int, Op]]) -> Iterator[tuple[int, Op]]:
    """The first stage sends no gradient: a W right after its backward is no pass of its own there."""
    last = max(stage for stage, _ in ops) if ops else 0
    before: dict[int, tuple[int, Op]] = {}
    for stage, op in ops:
        device = min(stage, last - stage)
        if stage or op.kind != "W" or before.get(device) != (0, Op("B", op.micro_batch)):
            yield stage, op
        before[device] = stage, op


class _Line(NamedTuple):
    """Passes of a plane rank, by their places in its two orders."""

    lines: Lines
    numbers: Sequence[int]
    clock: Clock
    kept: list[list[float]]
    """By stage and number [bytes]."""
    left: list[float]
    """What a backward leaves for its W [bytes]; infinite where it cannot be split."""

    @property
    def busy_s(self) -> list[float]:
        """Seconds of all passes, by device."""
        clock, last = self.clock, self.clock.num_stages - 1
        sums = [sum(f[i] + b[i] for i in self.numbers) for f, b in zip(clock.forward, clock.backward, strict=True)]
        return [sums[device] + sums[last - device] for device in range(clock.num_stages // 2)]

    def fastest(self, rules: Iterable[Rule], cap_bytes: float, bar_s: float) -> Passes | None:
        """The passes of the best of these rules, if they take less than ``bar_s``."""
        best: Passes | None = None
        least_s = (1 + ROUNDING) * max(self.busy_s)
        for rule in rules:
            best = self.played(rule, cap_bytes, best.end_s if best else bar_s) or best
            if best and best.end_s <= least_s:
                break
        return best

    def played(self, rule: Rule, cap_bytes: float, bar_s: float) -> Passes | None:
        """The passes as devices run them by a rule; None where they stop, or take ``bar_s`` or longer."""
        return _Play(self, rule, (1 - ROUNDING) * cap_bytes).run(bar_s)


class _Play:
    """All devices against each other, by one rule and under one cap; arrivals are by place in the two orders."""

    def __init__(self, line: _Line, rule: Rule, cap_bytes: float) -> None:
        forward, backward, self._need, _ = line.lines
        self._kept, self._left, clock = line.kept, line.left, line.clock
        self._orders = [line.numbers[i] for i in forward], [line.numbers[i] for i in backward]
        self._seconds, self._moving = (clock.forward, clock.backward), (clock.up, clock.down)
        self._weights = clock.weights[0]
        self._cap = cap_bytes
        self._patience = rule.patience
        last = self._last = clock.num_stages - 1
        count, devices = len(forward), clock.num_stages // 2
        self._at = [[0] * (last + 1) for _ in KINDS]
        self._came = [[[math.inf] * count for _ in range(last + 1)] for _ in KINDS]
        self._came[F][0], self._came[B][last] = [0.0] * count, [0.0] * count
        self._free = [0.0] * devices
        self._held = [0.0] * devices
        self._owed = [0.0] * devices
        """What later stages will keep of micro-batches whose earlier stage has run."""
        self._rest_s = line.busy_s
        self._link_free = [{-1: 0.0, 0: 0.0, 1: 0.0} for _ in self._free]
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in self._free]
        self._after = rule.after(F), rule.after(B)
        self._choices = [self._after[B]] * devices
        self._ops: list[tuple[int, Op]] = []
        self._events = [(0.0, device) for device in range(devices)]
        self._todo = 2 * count * (last + 1)

    def run(self, bar_s: float) -> Passes | None:
        """All passes, if their last one ends before ``bar_s``; None where it does not, or they stop."""
        free, waiting, events = self._free, self._waiting, self._events
        while events:
            now, device = heapq.heappop(events)
            if now < free[device]:
                continue
            if now + self._rest_s[device] >= bar_s:
                return None
            chosen, soonest = self._chosen(now, device)
            if chosen is None:
                wait = waiting[device]
                if wait and soonest - now >= self._patience * self._weights[wait[0][1]]:
                    self._run_weights(now, device)
            else:
                self._run_pass(now, device, *chosen)
        if self._todo:
            return None
        for device, wait in enumerate(waiting):
            free[device] += sum(self._weights[number] for _, number in wait)
            self._ops += [(stage, Op("W", number)) for stage, number in wait]
        end_s = max(free)
        return Passes(self._ops, end_s) if end_s < bar_s else None

    def _chosen(self, now: float, device: int) -> tuple[tuple[int, int] | None, float]:
        """Kind and stage of the pass that runs next; where none has arrived, when the first one known of will."""
        at, need, stages, soonest = self._at, self._need, (device, self._last - device), math.inf
        for kind, leg in self._choices[device]:
            stage = stages[leg]
            place = at[kind][stage]
            if place == len(need) or (kind and at[F][stage] < need[place]):
                continue
            if not kind and place >= need[at[B][stage]]:
                number = self._orders[F][place]
                later = stages[LATER]
                more = self._kept[stage][number] + self._kept[later][number] if leg == EARLIER else 0.0
                if self._held[device] + self._owed[device] + more > self._cap:
                    continue
            arrival = self._came[kind][stage][place]
            if arrival <= now:
                return (kind, stage), now
            soonest = min(soonest, arrival)
        return None, soonest

    def _run_weights(self, now: float, device: int) -> None:
        """The oldest W that waits."""
        stage, number = self._waiting[device].popleft()
        self._held[device] -= self._left[number]
        self._done(device, stage, Op("W", number), now, self._weights[number])

    def _run_pass(self, now: float, device: int, kind: int, stage: int) -> None:
        """A forward, or a backward, after a W where it would leave too much on top of what is held."""
        place, last = self._at[kind][stage], self._last
        number = self._orders[kind][place]
        taken_s, kept = self._seconds[kind][stage][number], self._kept[stage][number]
        if kind:
            if self._held[device] + self._owed[device] + self._left[number] <= self._cap:
                taken_s -= self._weights[number]
                self._held[device] += self._left[number]
                self._waiting[device].append((stage, number))
            elif self._waiting[device]:
                self._run_weights(now, device)
                return
            self._held[device] -= kept
        else:
            self._held[device] += kept
            self._owed[device] += self._kept[last - device][number] * (1 if stage == device else -1)
        self._at[kind][stage] = place + 1
        self._todo -= 1
        self._choices[device] = self._after[kind]
        self._done(device, stage, Op(KINDS[kind], number), now, taken_s)
        target = stage - 1 if kind else stage + 1
        if 0 <= target <= last:
            to = min(target, last - target)
            links, moving_s = self._link_free[device], self._moving[kind][min(stage, target)][number]
            links[to - device] = sent = max(self._free[device], links[to - device]) + moving_s
            self._came[kind][target][place] = sent
            if sent > self._free[to]:
                heapq.heappush(self._events, (sent, to))

    def _done(self, device: int, stage: int, op: Op, now: float, taken_s: float) -> None:
        self._ops.append((stage, op))
        self._rest_s[device] -= taken_s
        self._free[device] = now + taken_s
        heapq.heappush(self._events, (now + taken_s, device))
