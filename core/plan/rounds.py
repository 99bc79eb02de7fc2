"""Plans in rounds: what the ranks of a group that shares experts run at once, and dummies where one has nothing to run.

The k-th forwards of all ranks of a group are a round, and so are their k-th backwards. A stage runs the rounds of a
group in one order: before backward round j all forwards that any member has before its own j-th backward. So every
stage still runs at least as many forwards before a backward as the stage behind it, and no order that did not deadlock
deadlocks now. A round replays, and recomputes as many layers, as that of its members which does so most.
"""

from __future__ import annotations

from collections.abc import Iterator

from .order import DIRECTIONS, orders_of_stage
from .step_plan import MicroBatch, Op, PassKind, StepPlan


def in_rounds(plan: StepPlan) -> StepPlan:
    """The same work with every group of ``limits.in_step`` ranks in step at every stage.

    A plan that is in step stays as it is, and so does one whose shared micro-batches are not in one round of all their
    ranks: no dummies bring these into step. Where all ranks are one group, whose trainer fills gaps, kinds of passes
    alone are brought into step. Cost: O(passes x stages).
    """
    limits = plan.limits
    if limits.in_step == 1 or not plan.micro_batches or limits.num_ranks % limits.in_step:
        return plan
    plan = _with_equal_counts(plan)
    size = limits.num_ranks if plan.shared else limits.in_step
    groups = [range(first, first + size) for first in range(0, limits.num_ranks, size)]
    if not plan.order or (limits.all_in_step and _of_one_kind(plan)):
        return plan
    last = orders_of_stage(plan, limits.num_stages - 1)
    rounds = [round_ for group in groups for round_ in _rounds([last[rank] for rank in group], "B")]
    if plan.shared and not _shared_meet(plan, last):
        return plan
    plan = _alike(plan, rounds)
    stages = range(limits.num_stages)
    order = tuple(tuple(op for group in groups for op in _in_one_order(plan, stage, group)) for stage in stages)
    return plan.revised(order=order)


def _of_one_kind(plan: StepPlan) -> bool:
    """Whether all ranks run forwards and backwards in one pattern."""
    return len({tuple(op.kind for op in row) for row in orders_of_stage(plan, 0)}) == 1


def _with_equal_counts(plan: StepPlan) -> StepPlan:
    """With dummies behind all passes of those ranks of a group that have fewer than another member."""
    size = plan.limits.num_ranks if plan.shared else plan.limits.in_step
    more: dict[PassKind, list[MicroBatch]] = {}
    for kind in DIRECTIONS:
        counts = [len(plan.of_rank(rank, kind)) for rank in range(plan.limits.num_ranks)]  # type: ignore[arg-type]
        most = [max(counts[rank // size * size : (rank // size + 1) * size]) for rank in range(len(counts))]
        lacks = [(rank, most[rank] - count) for rank, count in enumerate(counts)]
        more[kind] = [MicroBatch((), (rank,)) for rank, lacking in lacks for _ in range(lacking)]
    if not any(more.values()):
        return plan
    first = {kind: len(plan.passes(kind)) for kind in DIRECTIONS}
    added = [Op(kind, first[kind] + k) for kind in DIRECTIONS for k in range(len(more[kind]))]
    rows = len(more["F"])
    return plan.revised(
        micro_batches=(*plan.micro_batches, *more["F"]),
        backward=(*plan.backward, *more["B"]) if plan.backward else (),
        order=tuple((*ops, *added) for ops in plan.order),
        recompute=tuple((*row, *[0] * rows) for row in plan.recompute),
        offload=(*plan.offload, *[0.0] * rows) if plan.offload else (),
    )


def _rounds(rows: list[list[Op]], kind: PassKind) -> Iterator[tuple[int, ...]]:
    """The micro-batches that the ranks with these passes run at once in a direction."""
    yield from zip(*([op.micro_batch for op in row if op.kind == kind] for row in rows), strict=True)


def _shared_meet(plan: StepPlan, rows: list[list[Op]]) -> bool:
    """Whether every shared micro-batch is in one round of all its ranks, in both directions."""
    for kind in DIRECTIONS:
        ranks = [m.ranks for m in plan.passes(kind)]
        for round_ in _rounds(rows, kind):
            if any(round_[rank] != number for number in set(round_) for rank in ranks[number]):
                return False
    return True


def _alike(plan: StepPlan, rounds: list[tuple[int, ...]]) -> StepPlan:
    """The plan whose backward rounds replay, and recompute as many layers, as those members that do so most."""
    alone = {j for j, forward in enumerate(plan.forward_of) if forward is None}
    replayed = sorted({number for round_ in rounds if alone & set(round_) for number in round_})
    recompute = [list(row) for row in plan.recompute]
    for row in recompute:
        for round_ in rounds:
            most = max(row[number] for number in round_)
            for number in round_:
                row[number] = most
    return plan.revised(replayed=tuple(replayed), recompute=tuple(map(tuple, recompute)))


def _in_one_order(plan: StepPlan, stage: int, group: range) -> Iterator[Op]:
    """The passes of a group at a stage, round by round; weight gradients stay behind the pass that they follow."""
    rows = [orders_of_stage(plan, stage)[rank] for rank in group]
    done = dict.fromkeys(DIRECTIONS, 0)
    passes = {kind: [[op for op in row if op.kind == kind] for row in rows] for kind in DIRECTIONS}
    behind = [_weights_behind(row) for row in rows]
    emitted: set[Op] = set()

    def run(kind: PassKind) -> Iterator[Op]:
        place = done[kind]
        done[kind] += 1
        for row, weights in zip(passes[kind], behind, strict=True):
            if row[place] not in emitted:
                emitted.add(row[place])
                yield row[place]
            yield from weights.get(row[place], ())

    needs = [_needs(row) for row in rows]
    for need in (max(each) for each in zip(*needs, strict=True)):
        while done["F"] < need:
            yield from run("F")
        yield from run("B")
    while done["F"] < len(passes["F"][0]):
        yield from run("F")


def _needs(row: list[Op]) -> Iterator[int]:
    """How many forwards come before each backward."""
    forwards = 0
    for op in row:
        if op.kind == "F":
            forwards += 1
        elif op.kind == "B":
            yield forwards


def _weights_behind(row: list[Op]) -> dict[Op, list[Op]]:
    """The weight gradients that follow each forward or backward of a rank."""
    behind: dict[Op, list[Op]] = {}
    last = row[0] if row else Op("F", -1)
    for op in row:
        if op.kind == "W":
            behind.setdefault(last, []).append(op)
        else:
            last = op
    return behind
