"""In which order the chunks of sequences run forward and backward at every pipeline stage.

After InfiniPipe (arXiv 2509.21275, section III-C): one order for chunks of long sequences and packs of short ones, in
which the chunks of a sequence run forward ascending and backward descending, and a stage alternates between forwards of
the next chunks and backwards of a finished sequence.

All stages run one order of forwards (launch order) and one of backwards: by the forwards that must precede them, and
among equal ones descending, so that a sequence starts backward as soon as its last chunk has run forward. With

    need_j   = forwards that must precede backward j
    owed_j   = max(need_j, owed_{j+1} - 1)

a stage that is ``a`` stages before the last runs forward i before backward j if i < owed_{j + (1 + extra) a}. What
backwards to come will need is thus spread, one forward a backward: at the last stage as many chunks are in flight as
the longest sequence to come has, ever fewer where the longest run first. 1F1B is the case of need_j = j + 1 and
``extra`` 0; ``extra`` 1 hides hand-overs and unlike passes (13B, 4 stages: bubble 11 -> 3 %, 3 more chunks in flight).

Which pass starts when is found by running all stages against each other: a forward that is due, else a backward that
has arrived; or, where that is predicted to end sooner, a stage waits for the forward that is due. A forward beyond
need_j waits while it does not fit under ``cap_bytes``.

It cannot deadlock, whatever the cap: a backward that has arrived runs unless a forward has that is due before it, so if
nothing can start all stages stand at one backward j, and the last stage lacks a forward i < need_j. No stage may refuse
that one, so the first stage that has not run it can. O(passes x stages x log stages).
"""

from __future__ import annotations

import heapq
import math
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

from ...core.costs.context import PlanningContext
from ...core.plan.order import in_slots
from ...core.plan.rounds import Round, backwards_of, reach_of
from ...core.plan.step_plan import Op, StepPlan
from .clock import Clock, clock_of, end_of, reordered


class Lines(NamedTuple):
    """The two orders of a plane rank, by numbers of micro-batches or places of rounds, and what ties them."""

    forward: list[int]
    backward: list[int]
    need: list[int]
    """For each backward the forwards that must precede it; never falls."""
    owed: list[int]
    """For each backward the forwards that are due before it at the last stage; never falls."""


def ordered(
    plan: StepPlan, context: PlanningContext, *, extra: int = 0, cap_bytes: float = math.inf, played: bool = True
) -> StepPlan:
    """The plan with an order for every stage, whatever order it had.

    Plans that group the backward anew, replay or run in step on all ranks keep theirs. With one stage, where nothing
    waits, a sequence runs backward before the next one's forward. A group of ranks in step that have equally many
    micro-batches runs one order of rounds, each as long as the longest of its micro-batches; so do ranks that share
    micro-batches, if each of these is the k-th of all its ranks.

    ``extra``: forwards that a stage runs ahead for each stage after it, beyond the one of 1F1B: memory for time.
    ``cap_bytes``: activations and prefix KV, estimated, above which it does not run ahead of what its next backward
    needs.
    ``played``: False for the order in slots alone where memory is left out, which is found in half the time.
    """
    limits = plan.limits
    groups = groups_in_rounds(plan)
    if plan.backward or plan.replayed or limits.all_in_step or groups is None:
        return plan
    clock = clock_of(plan, context)
    kept = [kept_bytes(plan, stage) for stage in range(limits.num_stages)] if cap_bytes < math.inf else []
    orders: list[list[Op]] = [[] for _ in range(limits.num_stages)]
    for rounds in groups:
        lines, of_rounds = lines_of_rounds(plan, rounds), clock_of_rounds(clock, rounds)
        kept_in_rounds = [[max(row[i] for i in round_) for round_ in rounds] for row in kept]
        if played or kept or limits.num_stages == 1:
            rows = _best(lines, of_rounds, extra, kept_in_rounds, cap_bytes)
        else:
            rows = _slots(lines, limits.num_stages, extra)
        for ops, of_row in zip(orders, rows, strict=True):
            ops += [Op(kind, number) for kind, place in of_row for number in rounds[place]]
    return reordered(plan, orders)


def groups_in_rounds(plan: StepPlan) -> list[list[Round]] | None:
    """The rounds of every group of ranks that run in step or share micro-batches; where counts of the former differ,
    those of each rank by itself. None where a shared micro-batch is in no single round."""
    limits = plan.limits
    if not plan.shared:
        firsts = range(0, limits.num_ranks, limits.in_step)
        return [rows for first in firsts for rows in _rows(plan, range(first, first + limits.in_step))]
    groups = []
    for team in teams_of(plan):
        behind = zip_longest(*(plan.of_rank(rank) for rank in team))
        rounds = [tuple(dict.fromkeys(i for i in round_ if i is not None)) for round_ in behind]
        if len(set(chain.from_iterable(rounds))) < sum(map(len, rounds)):
            return None
        groups.append(rounds)
    return groups if limits.in_step == 1 else None


def teams_of(plan: StepPlan) -> list[list[int]]:
    """Ranks that share micro-batches, directly or through others."""
    team = list(range(plan.limits.num_ranks))
    for micro_batch in plan.micro_batches if plan.shared else ():
        joining = {team[rank] for rank in micro_batch.ranks}
        team = [min(joining) if one in joining else one for one in team]
    return [[rank for rank, one in enumerate(team) if one == first] for first in sorted(set(team))]


def _rows(plan: StepPlan, group: range) -> list[list[Round]]:
    """The rounds of a group of ranks; where counts differ, those of each rank by itself."""
    numbers = [plan.of_rank(rank) for rank in group]
    if len(set(map(len, numbers))) == 1:
        return [list(zip(*numbers, strict=True))]
    return [[(number,) for number in row] for row in numbers]


def clock_of_rounds(clock: Clock, rounds: list[Round]) -> Clock:
    """What the passes of rounds take, by their places: as long as the longest of their micro-batches."""
    own = [round_[0] for round_ in rounds] if all(len(round_) == 1 for round_ in rounds) else None

    def longest(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(row[i] for i in own) if own is not None else tuple(max(row[i] for i in r) for r in rounds)

    return Clock(*(tuple(map(longest, table)) for table in clock))


def lines_of_rounds(plan: StepPlan, rounds: list[Round]) -> Lines:
    """Forwards, backwards and what ties them, of rounds of micro-batches, by the places of the rounds."""
    reach = reach_of(plan, rounds)
    back = backwards_of(reach)
    need = [reach[place] + 1 for place in back]
    owed = list(accumulate(reversed(need), lambda behind, own: max(own, behind - 1)))[::-1]
    return Lines(list(range(len(rounds))), back, need, owed if plan.limits.num_stages > 1 else need)


def kept_bytes(plan: StepPlan, stage: int) -> list[float]:
    """About what each micro-batch holds at a stage from its forward to its backward, prefix KV included."""
    limits = plan.limits.at(stage)
    memory = limits.memory
    head = memory.head_bytes_per_token if stage == limits.num_stages - 1 else 0.0
    whole = memory.replay_bytes_per_token if plan.recompute else 0.0
    layer = (whole or memory.activation_bytes_per_token) / limits.layers_per_stage
    recomputed = plan.recompute[stage] if plan.recompute else (0,) * len(plan.micro_batches)
    kept = []
    for m, slots, again in zip(plan.micro_batches, plan.slots["F"], recomputed, strict=True):
        stored = sum(s.stop - s.start for s in m.slices if s.sequence in plan.cut) * memory.kv_bytes_per_token
        layers = layer * (limits.layers_per_stage - again) + memory.input_bytes_per_token * again
        kept.append(slots * (layers + head) + stored)
    return kept


def _best(lines: Lines, clock: Clock, extra: int, kept: list[list[float]], cap_bytes: float) -> list[list[Op]]:
    """The passes of every stage: as they start when backwards may overtake, or in slots, whichever end first."""
    orders, end_s = _run(clock, lines, _aheads(clock.num_stages, extra), kept, cap_bytes)
    if not kept and clock.num_stages > 1:
        slots = _slots(lines, clock.num_stages, extra)
        if end_of(slots, clock) < end_s:
            return slots
    return orders


def _aheads(num_stages: int, extra: int) -> list[int]:
    return [(1 + extra) * (num_stages - 1 - stage) for stage in range(num_stages)]


def _slots(lines: Lines, num_stages: int, extra: int) -> list[list[Op]]:
    return [in_slots(lines.forward, lines.backward, lines.owed, ahead) for ahead in _aheads(num_stages, extra)]


def _run(
    clock: Clock, lines: Lines, aheads: list[int], kept: list[list[float]], cap_bytes: float
) -> tuple[list[list[Op]], float]:
    """The passes of every stage as they start when all stages run against each other, and when the last stage ends."""
    forward, backward, need, owed = lines
    count, last = len(forward), clock.num_stages - 1
    orders: list[list[Op]] = [[] for _ in range(last + 1)]
    next_f, next_b = [0] * (last + 1), [0] * (last + 1)
    free, held = [0.0] * (last + 1), [0.0] * (last + 1)
    # By place in the two orders, of what has been sent so far: when it arrives.
    came_up: list[list[float]] = [[0.0] * count, *([] for _ in range(last))]
    came_down: list[list[float]] = [[] for _ in range(last + 1)]
    events = [(0.0, 0)] if count else []
    while events:
        now, stage = heapq.heappop(events)
        f, b = next_f[stage], next_b[stage]
        if now < free[stage] or b == count:
            continue
        due = f < owed[min(b + aheads[stage], count - 1)]
        if due and kept and f >= need[b]:
            due = held[stage] + kept[stage][forward[f]] <= cap_bytes
        if due and f < len(came_up[stage]) and came_up[stage][f] <= now:
            number = forward[f]
            orders[stage].append(Op("F", number))
            next_f[stage] = f + 1
            free[stage] = now + clock.forward[stage][number]
            if kept:
                held[stage] += kept[stage][number]
            if stage < last:
                _send(events, free, came_up, clock.up[stage][number], stage, stage + 1)
        elif f >= need[b] if stage == last else b < len(came_down[stage]) and came_down[stage][b] <= now:
            number = backward[b]
            orders[stage].append(Op("B", number))
            next_b[stage] = b + 1
            free[stage] = now + clock.backward[stage][number]
            if kept:
                held[stage] -= kept[stage][number]
            if stage:
                _send(events, free, came_down, clock.down[stage - 1][number], stage, stage - 1)
        else:
            continue
        heapq.heappush(events, (free[stage], stage))
    return orders, max(free)


def _send(
    events: list[tuple[float, int]], free: list[float], came: list[list[float]], moving: float, stage: int, to: int
) -> None:
    """Book when what ``stage`` sends after its pass arrives: a link carries one tensor of a direction at a time."""
    arrival = max(free[stage], came[to][-1] if came[to] else 0.0) + moving
    came[to].append(arrival)
    if arrival > free[to]:
        heapq.heappush(events, (arrival, to))
