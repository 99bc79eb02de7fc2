"""Plans in rounds: what the ranks of a group that shares experts run at once, and dummies where one has nothing to run.

The k-th forwards of all ranks of a group are a round, and so are their k-th backwards. A stage runs the rounds of a
group in one order: before backward round j all forwards that any member has before its own j-th backward. So every
stage still runs at least as many forwards before a backward as the stage behind it, and no order that did not deadlock
deadlocks now. A round replays, and recomputes as many layers, as that of its members which does so most.

Tokens go back in a backward to where its forward had them from, so that a round of backwards is that of one round of
forwards. Dummies run backward beside those that they ran forward beside; a round whose members were forward in several
rounds is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator

from .order import DIRECTIONS, orders_of_stage
from .program import exchanges, lower
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
    in_step = _of_one_kind if limits.all_in_step else _exchanges_meet
    if not plan.order or in_step(plan):
        return plan
    for group in groups:
        plan = _with_dummies_beside(plan, group)
    last = orders_of_stage(plan, limits.num_stages - 1)
    rounds = [round_ for group in groups for round_ in _rounds([last[rank] for rank in group], "B")]
    if plan.shared and not _shared_meet(plan, last):
        return plan
    plan = _alike(plan, rounds, {op.micro_batch: k for row in last for k, op in enumerate(_only(row, "F"))})
    stages = range(limits.num_stages)
    order = tuple(tuple(op for group in groups for op in _in_one_order(plan, stage, group)) for stage in stages)
    return plan.revised(order=order)


def _of_one_kind(plan: StepPlan) -> bool:
    """Whether all ranks run forwards and backwards in one pattern."""
    return len({tuple(op.kind for op in row) for row in orders_of_stage(plan, 0)}) == 1


def _exchanges_meet(plan: StepPlan) -> bool:
    """Whether the ranks of every group exchange in the same passes at every stage."""
    ranks, stages, size = plan.limits.shape
    return all(
        len({exchanges(lower(plan, stage, rank)) for rank in range(first, first + size)}) == 1
        for stage in range(stages)
        for first in range(0, ranks, size)
    )


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
    rows, last = len(more["F"]), first["B"] + len(more["B"])
    return plan.revised(
        micro_batches=(*plan.micro_batches, *more["F"]),
        backward=(*plan.backward, *more["B"]) if plan.backward else (),
        replayed=(*plan.replayed, *range(first["B"], last)) if plan.backward else plan.replayed,
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


def _with_dummies_beside(plan: StepPlan, group: range) -> StepPlan:
    """The plan in which a dummy's place among the backwards of its rank is that of the member which was forward beside
    it and has no dummies, or fewest."""
    rows = {rank: orders_of_stage(plan, plan.limits.num_stages - 1)[rank] for rank in group}
    dummies = {
        rank: [op for op in _only(row, "B") if not plan.passes("B")[op.micro_batch].slices]
        for rank, row in rows.items()
    }
    model = min(group, key=lambda rank: len(dummies[rank]))
    forwards = {op.micro_batch: k for row in rows.values() for k, op in enumerate(_only(row, "F"))}
    place_of = [None if number is None else forwards.get(number) for number in plan.forward_of]
    wanted = [place_of[op.micro_batch] for op in _only(rows[model], "B")]
    renamed: dict[Op, Op] = {}
    for rank, row in rows.items():
        beside = {place_of[op.micro_batch]: op for op in dummies[rank]}
        beside.pop(None, None)
        backwards = _only(row, "B")
        fixed = {k: beside[place] for k, place in enumerate(wanted) if place in beside}
        others = iter(sorted((op for op in backwards if op not in fixed.values()), key=dummies[rank].__contains__))
        renamed |= {op: fixed[k] if k in fixed else next(others) for k, op in enumerate(backwards)}
    return plan.revised(order=tuple(tuple(renamed.get(op, op) for op in ops) for ops in plan.order))


def _only(row: list[Op], kind: PassKind) -> list[Op]:
    """The passes of a direction."""
    return [op for op in row if op.kind == kind]


def _alike(plan: StepPlan, rounds: list[tuple[int, ...]], place: dict[int, int]) -> StepPlan:
    """The plan whose backward rounds replay, and recompute as many layers, as those members that do so most.

    ``place``: of each forward among those of its rank. A round of several is replayed.
    """
    of = [None if forward is None else place[forward] for forward in plan.forward_of]
    if plan.backward:  # dummies are all alike there: none of them is tied to one forward
        of = [at if m.slices else None for at, m in zip(of, plan.backward, strict=True)]
    apart = [round_ for round_ in rounds if len({of[number] for number in round_} - {None}) > 1]
    alone = {j for j, at in enumerate(of) if at is None} | {j for round_ in apart for j in round_}
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
