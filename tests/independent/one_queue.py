"""What ranks do that have one queue for all they issue: a second send on a link waits, and all behind it.

Shares nothing with `evenload.core.simulate` but the turns that it is given. Every rank does one thing after the other:

    send      waits until its link is free: what it carried last has been taken; goes on at once then
    receive   waits for the tensor, and frees the link
    meet      of ranks that share a pass, or run in step: waits for all of them

Who waits for whom is fixed, so whether all come to their end does not depend on who goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evenload.core.plan.order import orders_of_device, orders_of_stage
from evenload.core.plan.step_plan import Op, StepPlan

Staged = tuple[int, Op]
Turns = Mapping[Staged | None, tuple[tuple[int, str], ...]]
Place = tuple[int, int]
"""A device and a rank."""


def at_once(plan: StepPlan, device: int, rank: int) -> Turns:
    """Turns of who holds nothing back: each send right behind its pass."""
    row = orders_of_device(plan, device)[rank]
    after = [*row, None][1:]
    return {
        behind: ((stage, op.kind),) if _goes(plan, stage, op.kind) else ()
        for (stage, op), behind in zip(row, after, strict=True)
    }


def _goes(plan: StepPlan, stage: int, kind: str) -> bool:
    """Whether a pass of a stage sends something to another device."""
    target = stage + {"F": 1, "B": -1, "W": 0}[kind]
    devices = [min(s, plan.limits.num_stages - 1 - s) if plan.limits.v_shape else s for s in (stage, target)]
    return all(0 <= s < plan.limits.num_stages for s in (stage, target)) and devices[0] != devices[1]


def blocked(plan: StepPlan, turns: Callable[..., Any]) -> dict[Place, tuple[str, Any]]:
    """Device and rank of who never comes to its end, with what it waits at."""
    num_ranks, num_devices = plan.limits.num_ranks, plan.limits.num_devices
    places = [(device, rank) for device in range(num_devices) for rank in range(num_ranks)]
    rows = {place: _actions(plan, *place, turns(plan, *place)) for place in places}
    parties = _parties(plan)
    at = dict.fromkeys(places, 0)
    links: dict[tuple[int, int, str], Op] = {}

    def now(place: Place) -> tuple[str, Any]:
        return rows[place][at[place]] if at[place] < len(rows[place]) else ("end", (place[0], None))

    def step(place: Place) -> bool:
        """Whether the rank could go on, and others perhaps with it."""
        (device, rank), (verb, staged) = place, now(place)
        stage, op = staged or (device, None)
        if verb == "send":
            if (stage, rank, op.kind) in links:
                return False
            links[stage, rank, op.kind] = op
        elif verb == "receive":
            link = stage - 1 if op.kind == "F" else stage + 1, rank, op.kind
            if link not in links:
                return False
            assert links.pop(link) == op, "links are queues"
        elif verb == "meet":
            ops, members = parties[stage, op]
            meeting = [now((device, r)) for r in members]
            if any(verb != "meet" or where != stage or other not in ops for verb, (where, other) in meeting):
                return False
            for r in members:
                at[device, r] += 1
            return True
        else:
            return False
        at[place] += 1
        return True

    while sum(map(step, places)):
        pass
    return {place: now(place) for place in places if at[place] < len(rows[place])}


def _actions(plan: StepPlan, device: int, rank: int, turns: Turns) -> list[tuple[str, Staged]]:
    row = orders_of_device(plan, device)[rank]
    stages = {stage for stage, _ in row}
    links = [(stage, kind) for stage in stages for kind in "FB"]
    held = {link: iter([op for stage, op in row if (stage, op.kind) == link]) for link in links}
    done: set[Staged] = set()
    actions: list[tuple[str, Staged]] = []
    for staged in (*row, None):
        for stage, kind in turns.get(staged, ()):
            sent = stage, next(held[stage, kind])
            assert sent in done, f"{sent} is sent before it is computed"
            actions.append(("send", sent))
        if staged is None:
            break
        stage, op = staged
        source = stage + {"F": -1, "B": 1, "W": 0}[op.kind]
        if op.kind != "W" and _goes(plan, source, op.kind):
            actions.append(("receive", staged))
        own = {(other, op) for other in stages} - {staged}
        assert op.kind == "W" or source not in stages or (source, op) in done & own, "a stage is ahead of its source"
        if op.kind != "W":
            actions.append(("meet", staged))
        done.add(staged)
    for (stage, kind), ops in held.items():
        assert not _goes(plan, stage, kind) or next(ops, None) is None, "a result is never sent"
    return actions


def _parties(plan: StepPlan) -> dict[tuple[int, Op], tuple[set[Op], set[int]]]:
    """For each pass at a stage the passes that run with it, and their ranks."""
    size, parties = plan.limits.in_step, {}
    for stage in range(plan.limits.num_stages):
        rows = [[op for op in row if op.kind != "W"] for row in orders_of_stage(plan, stage)]
        sets = {op: {op} for row in rows for op in row}
        for first in range(0, len(rows), size):
            for together in zip(*rows[first : first + size], strict=False):
                merged = set().union(*(sets[op] for op in together))
                for op in merged:
                    sets[op] = merged
        for op, ops in sets.items():
            parties[stage, op] = ops, {r for one in ops for r in plan.passes(one.kind)[one.micro_batch].ranks}
    return parties
