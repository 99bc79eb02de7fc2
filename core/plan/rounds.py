"""Plans in rounds: what the ranks of a group that shares experts run at once, and dummies where one has nothing to run.

A token's gradient comes back from its experts as the token went to them: the backwards of micro-batches whose forwards
ran at once run at once, too. So the k-th forwards of all ranks of a group are a *round*, whose backwards are a round as
well, and a stage runs the rounds of a group in one order:

    backwards    by the last forward round that must precede them, of equal ones the latest first (`reach_of`)
    before each  as many forward rounds as it needs, and as any member has run at this stage before as many backwards

Every stage still runs at least as many forwards before a backward as the stage after it, so what did not deadlock does
not deadlock now. A round replays, and recomputes as many layers, as that of its members which does so most; what runs
forward again may meet others in its backward than in its first forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

from .order import DIRECTIONS, orders_of_stage
from .step_plan import MicroBatch, Op, PassKind, StepPlan

Round = tuple[int, ...]
"""Numbers of the micro-batches, one of each rank, that run at once."""


def in_rounds(plan: StepPlan) -> StepPlan:
    """A plan of the same work in which every group of ``limits.in_step`` ranks is in step at every stage.

    A plan that is in step stays as it is, and so does one whose shared micro-batches are not in one round of all their
    ranks: no dummies bring these into step. Cost: O(passes x stages).
    """
    limits = plan.limits
    if limits.in_step == 1 or not plan.micro_batches or limits.num_ranks % limits.in_step:
        return plan
    size = limits.num_ranks if plan.shared else limits.in_step
    groups = [range(first, first + size) for first in range(0, limits.num_ranks, size)]
    plan = _with_equal_counts(plan, groups)
    if not plan.order or (plan.shared and not _shared_meet(plan)):
        return plan
    plan = _alike(plan, [round_ for group in groups for round_ in _rounds(plan, group, "F")])
    stages = range(limits.num_stages)
    # What ranks share is in the lists of all of them, and once in that of the stage.
    rows = [[_in_one_order(plan, stage, group) for group in groups] for stage in stages]
    order = tuple(tuple(dict.fromkeys(chain.from_iterable(row))) for row in rows)
    return plan if order == plan.order else plan.revised(order=order)


def levelled(micro_batches: Sequence[MicroBatch], num_ranks: int) -> list[MicroBatch]:
    """Micro-batches in rounds that all ranks run, with dummies for those without work: each in the first round that is
    later than what its ranks did before."""
    done = [0] * num_ranks
    rounds: list[list[MicroBatch]] = []
    for m in micro_batches:
        place = max(done[rank] for rank in m.ranks)
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(m)
        for rank in m.ranks:
            done[rank] = place + 1
    return [m for one in rounds for m in (*one, *idle(one, num_ranks))]


def idle(micro_batches: Iterable[MicroBatch], num_ranks: int) -> list[MicroBatch]:
    """A dummy for each rank that has none of these micro-batches."""
    busy = {rank for m in micro_batches for rank in m.ranks}
    return [MicroBatch((), (rank,)) for rank in range(num_ranks) if rank not in busy]


def reach_of(plan: StepPlan, rounds: list[Round]) -> list[int]:
    """For each forward round, by its place, the last one whose backward must come before its own, or itself."""
    reach = list(range(len(rounds)))
    chains: dict[int, list[int]] = {}
    for place, numbers in enumerate(rounds) if plan.cut else ():
        for s in dict.fromkeys(s for number in numbers for s in plan.micro_batches[number].slices):
            if s.sequence in plan.cut:
                chains.setdefault(s.sequence, []).append(place)
    behind: dict[int, list[int]] = {}
    for own in chains.values():
        for earlier, later in pairwise(own):
            behind.setdefault(earlier, []).append(later)
    for place in sorted(behind, reverse=True):
        reach[place] = max(reach[later] for later in behind[place])
    return reach


def backwards_of(reach: list[int]) -> list[int]:
    """The places of rounds in the order of their backwards: a sequence runs backward as soon as its forwards have."""
    return sorted(range(len(reach)), key=lambda place: (reach[place], -place))


def _with_equal_counts(plan: StepPlan, groups: list[range]) -> StepPlan:
    """With dummies after all passes of those ranks of a group that have fewer than another member."""
    more: dict[PassKind, list[MicroBatch]] = {"F": [], "B": []}
    for kind in DIRECTIONS:
        for group in groups:
            counts = [len(plan.of_rank(rank, kind)) for rank in group]  # type: ignore[arg-type]
            for rank, count in zip(group, counts, strict=True):
                more[kind] += [MicroBatch((), (rank,))] * (max(counts) - count)
    if not any(more.values()):
        return plan
    added = [Op(kind, len(plan.passes(kind)) + k) for kind in DIRECTIONS for k in range(len(more[kind]))]
    dummies = len(more["F"])
    return plan.revised(
        micro_batches=(*plan.micro_batches, *more["F"]),
        backward=(*plan.backward, *more["B"]) if plan.backward else (),
        order=tuple((*ops, *added) for ops in plan.order),
        recompute=tuple((*row, *[0] * dummies) for row in plan.recompute),
        offload=(*plan.offload, *[0.0] * dummies) if plan.offload else (),
    )


def _rounds(plan: StepPlan, group: range, kind: PassKind) -> list[Round]:
    """What the ranks of a group run at once in a direction, in their own orders."""
    rows = orders_of_stage(plan, plan.limits.num_stages - 1)
    return list(zip(*([op.micro_batch for op in rows[rank] if op.kind == kind] for rank in group), strict=True))


def _shared_meet(plan: StepPlan) -> bool:
    """Whether every shared micro-batch is in one round of all its ranks."""
    ranks = [m.ranks for m in plan.micro_batches]
    rounds = _rounds(plan, range(plan.limits.num_ranks), "F")
    return all(round_[rank] == number for round_ in rounds for number in set(round_) for rank in ranks[number])


def _alike(plan: StepPlan, rounds: list[Round]) -> StepPlan:
    """The plan whose rounds replay, and recompute as many layers, as those members that do so most. Where the backward
    has groups of its own, all of them are replayed: no forward round has the same members."""
    if plan.backward:
        replayed = tuple(range(len(plan.backward)))
        return plan if plan.replayed == replayed else plan.revised(replayed=replayed)
    again = set(plan.replayed)
    replayed = tuple(sorted({number for round_ in rounds if again & set(round_) for number in round_}))
    recompute = [list(row) for row in plan.recompute]
    for row in recompute:
        for round_ in rounds:
            most = max(row[number] for number in round_)
            for number in round_:
                row[number] = most
    changed = {"replayed": replayed, "recompute": tuple(map(tuple, recompute))}
    return plan if all(getattr(plan, name) == value for name, value in changed.items()) else plan.revised(**changed)


def _in_one_order(plan: StepPlan, stage: int, group: range) -> Iterator[Op]:
    """The passes of a group at a stage, round by round; weight gradients run after the pass that they followed, or
    after their backward."""
    rows = [orders_of_stage(plan, stage)[rank] for rank in group]
    forward = _rounds(plan, group, "F")
    needs = [max(each) for each in zip(*map(_needs, rows), strict=True)]
    if plan.backward:
        backward = _rounds(plan, group, "B")
    else:
        reach = reach_of(plan, forward)
        places = backwards_of(reach)
        backward = [forward[place] for place in places]
        needs = [max(own, reach[place] + 1) for own, place in zip(needs, places, strict=True)]
    weights = [_WeightsLeft(row) for row in rows]
    done = 0
    for need, round_ in zip(accumulate(needs, max), backward, strict=True):
        for numbers in forward[done:need]:
            yield from _run("F", numbers, weights)
        done = max(done, need)
        yield from _run("B", round_, weights)
    for left in weights:
        yield from left.all()


def _run(kind: PassKind, numbers: Round, weights: list[_WeightsLeft]) -> Iterator[Op]:
    """A round, and the weight gradients that can run after it."""
    yield from (Op(kind, number) for number in numbers)
    for number, left in zip(numbers, weights, strict=True):
        yield from left.behind(Op(kind, number))


class _WeightsLeft:
    """The weight gradients of a rank that have not run: each waits for its backward and for the pass before it."""

    def __init__(self, row: list[Op]) -> None:
        self._missing: dict[Op, int] = {}
        """How many passes each still waits for."""
        self._behind: dict[Op, list[Op]] = {}
        last = Op("F", -1)
        for op in row:
            if op.kind != "W":
                last = op
                continue
            before = {last, Op("B", op.micro_batch)}
            self._missing[op] = len(before)
            for one in before:
                self._behind.setdefault(one, []).append(op)

    def behind(self, op: Op) -> Iterator[Op]:
        """Weight gradients that wait for nothing more, now that this pass has run."""
        for weight in self._behind.pop(op, ()):
            self._missing[weight] -= 1
            if not self._missing[weight]:
                del self._missing[weight]
                yield weight

    def all(self) -> Iterator[Op]:
        yield from self._missing


def _needs(row: list[Op]) -> Iterator[int]:
    forwards = 0
    for op in row:
        if op.kind == "F":
            forwards += 1
        elif op.kind == "B":
            yield forwards
