"""Plays the orders of all stages and ranks against each other: when every pass starts and ends.

A rank of a stage runs one pass at a time, in its order; where a device has two stages, it runs one of both in the
order of the plan's merge. A pass on several ranks starts when all are free. Forward
waits for the stage before and backward for the stage after, and for what travels between them; a link carries one
tensor of a direction at a time. Weight gradients that are a pass of their own concern nobody but their rank. The k-th
passes of ranks that run in step (a group that shares experts, or all ranks) start together and take as long as the
slowest. O(passes x stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..aliases import Ranks
from ..errors import PlanError
from ..plan.grid import render
from ..plan.order import DIRECTIONS, PASS_KINDS, orders_of_device, orders_of_stage
from ..plan.program import lower
from ..plan.step_plan import Op, PassKind, StepPlan

AHEAD = {"F": 1, "B": -1, "W": 0}
"""To which stage the result of a pass goes, from its own."""


class Event(NamedTuple):
    """One pass at one stage."""

    stage: int
    op: Op
    ranks: tuple[int, ...]
    start_s: float
    end_s: float
    slowest_s: float
    """When the last of the passes that run together with it ends."""
    free_s: float
    """When its ranks go on: later than ``slowest_s`` where they wait for a send."""


Stuck = tuple[int, int, Op]
"""A pass that can never run, at a stage on a rank."""
SecondsOf = Callable[[int, Op], float]
"""Of a pass at a stage."""


def nothing(stage: int, op: Op) -> float:
    """A hand-over that takes no time."""
    return 0.0


def play(plan: StepPlan, seconds: SecondsOf, hand_over: SecondsOf = nothing, *, waits: bool = False) -> Iterator[Event]:
    """Every pass of a plan. Raises PlanError when none that is left can ever start.

    ``hand_over``: seconds from the end of a pass to the arrival of its result at the next stage; ``waits``: a rank goes
    on only when what it sends has arrived.
    """
    if plan.limits.all_in_step:
        yield from _rounds(plan, seconds)
        return
    stuck: list[Stuck] = []
    yield from _walk(plan, seconds, hand_over, stuck, waits=waits)
    if stuck:
        waiting = [f"rank {rank} of stage {stage} waits at {op.kind}{op.micro_batch}" for stage, rank, op in stuck[:8]]
        drawn = grid(plan, [(stage, rank) for stage, rank, _ in stuck[:8]], columns=12)
        raise PlanError("the order deadlocks", f"{'; '.join(waiting)}\n{drawn}", "let ranks and stages meet in order")


def _walk(
    plan: StepPlan, seconds: SecondsOf, hand_over: SecondsOf, stuck: list[Stuck], *, waits: bool = False
) -> Iterator[Event]:
    """Every pass that can run; adds to ``stuck`` stage, rank and pass of those that wait for ever."""
    num_ranks, num_stages, size = plan.limits.shape
    orders, stages = _rows_of_devices(plan)
    device_of = [plan.limits.device_of_stage(stage) for stage in range(num_stages)]
    ranks = {kind: [m.ranks for m in plan.passes(kind)] for kind in PASS_KINDS}
    at = [[0] * num_ranks for _ in orders]
    free = [[0.0] * num_ranks for _ in orders]
    arrives: list[dict[Op, float]] = [{} for _ in device_of]
    # By the way from device to device, which is none where a device hands over to itself.
    link_free = [{direction: [0.0] * num_ranks for direction in (-1, 0, 1)} for _ in orders]
    ready = [(device, rank) for device, rows in enumerate(orders) for rank in range(len(rows))]
    left = sum(len(row) for rows in orders for row in rows)
    while ready:
        device, rank = ready.pop()
        row, place = orders[device][rank], at[device][rank]
        if place == len(row):
            continue
        op, stage = row[place], stages[device][rank][place] if stages else device
        ahead = AHEAD[op.kind]
        together = _together(rank, orders[device], at[device], ranks, size) if ahead else {op: (rank,)}
        if not together:
            continue
        source, target = stage - ahead, stage + ahead
        comes = ahead and 0 <= source < num_stages
        if comes and any(other not in arrives[stage] for other in together):
            continue
        start = max(free[device][r] for members in together.values() for r in members)
        if comes:
            start = max(start, *(arrives[stage][other] for other in together))
        each = {other: seconds(stage, other) for other in together}
        end = start + max(each.values())
        for other, members in together.items():
            goes_on = end
            if ahead and 0 <= target < num_stages:
                to = device_of[target]
                links = link_free[device][to - device]
                arrival = max([end, *(links[r] for r in members)]) + hand_over(min(stage, target), other)
                arrives[target][other] = arrival
                for r in members:
                    links[r] = arrival
                ready += [(to, r) for r in members]
                goes_on = arrival if waits else end
            for r in members:
                free[device][r] = goes_on
                at[device][r] += 1
                ready.append((device, r))
            left -= len(members)
            yield Event(stage, other, members, start, start + each[other], end, goes_on)
    stuck += [
        (stages[device][rank][at[device][rank]] if stages else device, rank, row[at[device][rank]])
        for device, rows in enumerate(orders if left else ())
        for rank, row in enumerate(rows)
        if at[device][rank] < len(row)
    ]


def _rows_of_devices(plan: StepPlan) -> tuple[list[list[list[Op]]], list[list[list[int]]]]:
    """The passes of every rank at every device, and of each its stage; no stages where each device has one."""
    devices = range(plan.limits.num_devices)
    if not plan.merge:
        return [orders_of_stage(plan, device) for device in devices], []
    rows = [orders_of_device(plan, device) for device in devices]
    passes = [[[op for _, op in row] for row in ranks] for ranks in rows]
    return passes, [[[stage for stage, _ in row] for row in ranks] for ranks in rows]


def _together(
    rank: int, rows: list[list[Op]], at: list[int], ranks: dict[PassKind, list[Ranks]], size: int
) -> dict[Op, Ranks]:
    """The passes that start with the next one of a rank, and their ranks: the one of all that share it, and those of
    all ranks that run in step with one of these. Nothing where one of them comes to another pass first."""
    passes: dict[Op, Ranks] = {}
    groups, known = [rank // size], {rank // size}
    while groups:
        first = groups.pop() * size
        for member in range(first, first + size):
            if at[member] == len(rows[member]):
                return {}
            op = rows[member][at[member]]
            if op.kind == "W":
                return {}
            if op not in passes:
                passes[op] = ranks[op.kind][op.micro_batch]
                further = {r // size for r in passes[op]} - known
                known |= further
                groups += further
    meet = all(at[r] < len(rows[r]) and rows[r][at[r]] == op for op, members in passes.items() for r in members)
    return passes if meet else {}


def grid(plan: StepPlan, shown: Sequence[tuple[int, int]], columns: int = 0) -> str:
    """The programs of these (stage, rank) against each other, every computing action one column long.

    So many ``columns``, up to where the last of them waits for ever; 0: all.
    """
    cells = {
        (stage, op): [f" {action.cell}" for action in actions if action.computes]
        for stage, rank in ((s, r) for s in range(plan.limits.num_stages) for r in range(plan.limits.num_ranks))
        for op, actions in groupby(lower(plan, stage, rank), lambda action: action.op)
    }
    stuck: list[Stuck] = []
    events = list(_walk(plan, lambda *pass_: float(len(cells.get(pass_, ()))), nothing, stuck))
    drawn: dict[tuple[int, int], dict[int, str]] = {place: {} for place in shown}
    for event in events:
        for place in ((event.stage, rank) for rank in event.ranks):
            if place in drawn:
                drawn[place] |= enumerate(cells.get((event.stage, event.op), ()), int(event.start_s))
    for stage, rank, op in stuck:
        if (row := drawn.get((stage, rank))) is not None:
            row[max(row, default=-1) + 1] = f"[{op.kind}{op.micro_batch}]"
    end = max([0, *(int(event.end_s) for event in events), *(column + 1 for row in drawn.values() for column in row)])
    first = max(0, end - columns) if columns else 0
    return render({_label(plan, *place): row for place, row in drawn.items()}, first, max(1, end - first))


def _label(plan: StepPlan, stage: int, rank: int) -> str:
    words = [f"stage {stage}"] * (plan.limits.num_stages > 1) + [f"rank {rank}"] * (plan.limits.num_ranks > 1)
    return ", ".join(words) or "rank 0"


def _rounds(plan: StepPlan, seconds: SecondsOf) -> Iterator[Event]:
    """All ranks in step; the order of the kinds is rank 0's, as counts are equal."""
    orders = orders_of_stage(plan, 0)
    counts = {rank: len(row) for rank, row in enumerate(orders)}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        detail = f"{counts[few]} on rank {few}, {counts[many]} on rank {many}"
        raise PlanError("ranks that run in step have unlike numbers of passes", detail, "add dummies")
    of_kind = {kind: [[op for op in row if op.kind == kind] for row in orders] for kind in DIRECTIONS}
    done = dict.fromkeys(DIRECTIONS, 0)
    now = 0.0
    for kind, _ in orders[0]:
        passes = [row[done[kind]] for row in of_kind[kind]]
        done[kind] += 1
        each = [seconds(0, op) for op in passes]
        after = now + max(each)
        for rank, (op, taken) in enumerate(zip(passes, each, strict=True)):
            yield Event(0, op, (rank,), now, now + taken, after, after)
        now = after
