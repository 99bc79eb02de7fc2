"""In which order the ranks of a stage run their passes: the plan's own order, or the host's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Row
from typing import TypeVar

from .step_plan import Op, PassKind, StepPlan, fact_of_plan

StagedOp = tuple[int, Op]
"""A stage, and one of its passes."""

DIRECTIONS: tuple[PassKind, ...] = ("F", "B")
Item = TypeVar("Item")
PASS_KINDS: tuple[PassKind, ...] = (*DIRECTIONS, "W")


@fact_of_plan("micro_batches", "backward", "order", "limits")
def orders_of_stage(plan: StepPlan, stage: int) -> list[list[Op]]:
    """The passes of every plane rank at a stage: ``result[rank]``, not to be written to."""
    if not plan.order:
        ahead = plan.limits.num_stages - 1 - stage
        return [one_forward_one_backward(plan.of_rank(rank), ahead) for rank in range(plan.limits.num_ranks)]
    lists: list[list[Op]] = [[] for _ in range(plan.limits.num_ranks)]
    ranks = {kind: [m.ranks for m in plan.passes(kind)] for kind in PASS_KINDS}
    for op in plan.order[stage]:
        for rank in ranks[op.kind][op.micro_batch]:
            lists[rank].append(op)
    return lists


@fact_of_plan("micro_batches", "backward", "order", "merge", "limits")
def orders_of_device(plan: StepPlan, device: int) -> list[list[StagedOp]]:
    """The passes of every plane rank at a device of its pipeline, whatever their stages: ``result[rank]``."""
    if not plan.merge:
        return [[(device, op) for op in ops] for ops in orders_of_stage(plan, device)]
    lists: list[list[StagedOp]] = [[] for _ in range(plan.limits.num_ranks)]
    ranks = {kind: [m.ranks for m in plan.passes(kind)] for kind in PASS_KINDS}
    next_of = {stage: iter(plan.order[stage]) for stage in plan.limits.stages_of_device(device)}
    for stage in plan.merge[device]:
        op = next(next_of[stage])
        for rank in ranks[op.kind][op.micro_batch]:
            lists[rank].append((stage, op))
    return lists


def in_turn(rows: Row[Row[Item]]) -> Iterator[tuple[int, Item]]:
    """Items of ``rows[rank]`` in launch order, each with its rank: the first of every rank, then the next of each."""
    for place in range(max(map(len, rows), default=0)):
        yield from ((rank, row[place]) for rank, row in enumerate(rows) if place < len(row))


def one_forward_one_backward(micro_batches: Row[int], ahead: int) -> list[Op]:
    """1F1B (Narayanan et al., arXiv 1806.03377): ``ahead`` forwards first, backwards in the order of the forwards."""
    return in_slots(micro_batches, micro_batches, range(1, len(micro_batches) + 1), ahead)


def in_slots(forward: Row[int], backward: Row[int], need: Row[int], ahead: int) -> list[Op]:
    """Backwards in their order, each preceded by the forwards it needs, ``ahead`` slots early.

    Slot j holds the forwards that backward j needs and no earlier one did; ``need[j]`` counts the forwards that must
    precede it and never falls. A stage that is ``ahead`` stages before the last runs that many slots of forwards ahead,
    so that all stages see one order of forwards and one of backwards, and none waits in a circle. 1F1B: need[j] = j+1.
    """
    out: list[Op] = []
    done = 0
    for place, index in enumerate(backward):
        wanted = need[min(place + ahead, len(need) - 1)]
        out += [Op("F", i) for i in forward[done:wanted]]
        done = max(done, wanted)
        out.append(Op("B", index))
    return out + [Op("F", i) for i in forward[done:]]
