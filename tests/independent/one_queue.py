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

from evenload.core.plan.order import orders_of_stage
from evenload.core.plan.step_plan import Op, StepPlan

Turns = Mapping[Op | None, tuple[str, ...]]
Place = tuple[int, int]
"""A stage and a rank."""


def at_once(plan: StepPlan, stage: int, rank: int) -> Turns:
    """Turns of who holds nothing back: each send right behind its pass."""
    last = plan.limits.num_stages - 1
    row = orders_of_stage(plan, stage)[rank]
    sends = {"F": stage < last, "B": stage > 0, "W": False}
    after = [*row, None][1:]
    return {behind: (op.kind,) if sends[op.kind] else () for op, behind in zip(row, after, strict=True)}


def blocked(plan: StepPlan, turns: Callable[..., Any]) -> dict[Place, tuple[str, Any]]:
    """Stage and rank of who never comes to its end, with what it waits at."""
    num_ranks, num_stages, _ = plan.limits.shape
    places = [(stage, rank) for stage in range(num_stages) for rank in range(num_ranks)]
    rows = {place: _actions(plan, *place, turns(plan, *place)) for place in places}
    parties = _parties(plan)
    at = dict.fromkeys(places, 0)
    links: dict[tuple[Place, str], Op] = {}

    def now(place: Place) -> tuple[str, Any]:
        return rows[place][at[place]] if at[place] < len(rows[place]) else ("end", None)

    def step(place: Place) -> bool:
        """Whether the rank could go on, and others perhaps with it."""
        (stage, rank), (verb, op) = place, now(place)
        if verb == "send":
            if (place, op.kind) in links:
                return False
            links[place, op.kind] = op
        elif verb == "receive":
            link = (stage - 1 if op.kind == "F" else stage + 1, rank), op.kind
            if link not in links:
                return False
            assert links.pop(link) == op, "links are queues"
        elif verb == "meet":
            ops, members = parties[stage, op]
            if any(now((stage, r))[0] != "meet" or now((stage, r))[1] not in ops for r in members):
                return False
            for r in members:
                at[stage, r] += 1
            return True
        else:
            return False
        at[place] += 1
        return True

    while sum(map(step, places)):
        pass
    return {place: now(place) for place in places if at[place] < len(rows[place])}


def _actions(
    plan: StepPlan, stage: int, rank: int, turns: Mapping[Op | None, tuple[str, ...]]
) -> list[tuple[str, Any]]:
    row, last = orders_of_stage(plan, stage)[rank], plan.limits.num_stages - 1
    held = {kind: iter([op for op in row if op.kind == kind]) for kind in "FB"}
    done: set[Op] = set()
    actions: list[tuple[str, Any]] = []
    for op in (*row, None):
        for kind in turns.get(op, ()):
            sent = next(held[kind])
            assert sent in done, f"{sent} is sent before it is computed"
            actions.append(("send", sent))
        if op is None:
            break
        if (op.kind == "F" and stage > 0) or (op.kind == "B" and stage < last):
            actions.append(("receive", op))
        if op.kind != "W":
            actions.append(("meet", op))
        done.add(op)
    for kind, goes in (("F", stage < last), ("B", stage > 0)):
        assert not goes or next(held[kind], None) is None, "a result is never sent"
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
