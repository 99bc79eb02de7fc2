"""Lawful plans with cut sequences, by hand and at random; every micro-batch has one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.runtime.attention.labels import Labels
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights

LENGTHS = (160, 75, 9, 13, 22, 5, 17, 1)
"""Sequence 0 becomes 16 slices on rank 0, sequence 1 five on rank 1; the others go with them."""

Row = list[list[Slice]]
"""Micro-batches of a rank."""


def tokens_of(plan: StepPlan) -> Callable[[int], Any]:
    """Token ids of each sequence of a plan, by its index."""
    return lambda i: np.random.default_rng(i).integers(0, 97, int(plan.lengths[i]))


def labels_of(plan: StepPlan, number: int) -> Labels | None:
    """Labels of the plan with such a number among others: every token; half of them; with weights by sequence; half of
    them, with weights by token, and so on."""
    tokens = tokens_of(plan)
    labels = half_masked(None, tokens, np.arange(len(plan.lengths)), plan.lengths, 0) if number % 2 else None
    if number % 4 < 2:
        return labels
    tenants = plan.tenants if len(plan.tenants) else None
    return drawn_weights(labels, tokens, plan.lengths, "token" if number % 2 else "sequence", [0], tenants)


def whole(sequence: int) -> Slice:
    return Slice(sequence, 0, LENGTHS[sequence])


def chain(sequence: int, count: int) -> list[Slice]:
    """A sequence in slices of nearly equal length."""
    borders = [LENGTHS[sequence] * i // count for i in range(count + 1)]
    return [Slice(sequence, a, b) for a, b in pairwise(borders)]


def whole_sequences(ranks: int = 2) -> StepPlan:
    rows = [[[whole(i)] for i in range(len(LENGTHS)) if i % ranks == rank] for rank in range(ranks)]
    return make(LENGTHS, rows, random.Random(0))


def chains(replayed: str = "none", equal: bool = False) -> StepPlan:
    """16 and 5 slices with whole sequences between them; `replayed`: none, some or all of the micro-batches.

    With `equal` the second rank gets dummies, so that all run the same kinds of passes: forwards, then backwards.
    """
    first = [[piece] for piece in chain(0, 16)]
    for at, sequence in ((0, 2), (5, 3), (15, 7)):
        first[at].append(whole(sequence))
    second = [*([piece] for piece in chain(1, 5)), [whole(5), whole(6)]]
    second[2].insert(0, whole(4))
    if equal:
        second += [[] for _ in range(len(first) - len(second))]
    rows = [first, second]
    counts = [range(len(first)), range(len(first), len(first) + len(second))]
    chosen = {"none": 0, "some": 2, "all": 1}[replayed]
    again = [j for indices in counts for j in indices if chosen and j % chosen == 0]
    return make(LENGTHS, rows, None, again=again, equal=equal)


def regrouped() -> StepPlan:
    """Other cuts backward: 4 forward slices of sequence 0 against 16, a whole sequence cut backward, one kept alike."""
    forward = [
        [[piece] for piece in chain(0, 4)] + [[whole(2), whole(3)]],
        [[whole(1)], [whole(4), whole(5)], [whole(6), whole(7)]],
    ]
    backward = [
        [[whole(2), whole(3)], *([piece] for piece in reversed(chain(0, 16)))],
        [[piece] for piece in reversed(chain(1, 5))] + [[whole(7), whole(4)], [whole(6), whole(5)]],
    ]
    return make(LENGTHS, forward, None, backward=backward)


def random_plan(seed: int, ranks: int = 2) -> StepPlan:
    """Anything lawful: lengths, cuts, groups, kept or replayed, the same groups backward or others, any order."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 90))) for _ in range(rng.randint(3, 7))] + [30]
    rank_of = [rng.randrange(ranks) for _ in lengths]
    own_groups = rng.random() < 0.5
    forward = [_groups(lengths, [i for i, r in enumerate(rank_of) if r == rank], rng) for rank in range(ranks)]
    backward = None
    if own_groups:
        again = [_groups(lengths, [i for i, r in enumerate(rank_of) if r == rank], rng) for rank in range(ranks)]
        # Now and then a rank groups alike in both directions, which lets it keep activations.
        backward = [row[::-1] if rng.random() < 0.7 else same[::-1] for row, same in zip(again, forward, strict=True)]
    count = sum(map(len, backward or forward))
    share = rng.choice((0.0, 0.5, 1.0))
    return make(tuple(lengths), forward, rng, backward, [j for j in range(count) if rng.random() < share])


def _groups(lengths: list[int], mine: list[int], rng: random.Random) -> Row:
    left = {}
    for i in mine:
        cuts = sorted(rng.sample(range(1, lengths[i]), min(lengths[i] - 1, rng.choice((0, 0, 1, 3, 15)))))
        borders = [0, *cuts, lengths[i]]
        left[i] = [Slice(i, a, b) for a, b in pairwise(borders)]
    row: Row = []
    while left:
        taken = rng.sample(sorted(left), min(len(left), rng.randint(1, 3)))
        row.append([left[i].pop(0) for i in taken])
        left = {i: pieces for i, pieces in left.items() if pieces}
    return row


def make(
    lengths: Any,
    forward: list[Row],
    rng: random.Random | None,
    backward: list[Row] | None = None,
    again: Any = (),
    equal: bool = False,
) -> StepPlan:
    """The checked plan of given groups by rank; backward groups that equal no forward one are replayed in any case.

    Args:
        rng: draws the order of passes; None runs all forwards first, then backwards in reverse.
        again: backward micro-batches to be replayed.
    """
    limits = Limits(len(forward), 10**6, all_in_step=equal)
    groups, groups_back = _launched(forward), _launched(backward or [])
    known = {m[:2] for m in groups}
    replayed = {j for j, m in enumerate(groups_back) if m[:2] not in known} | set(again)
    plan = StepPlan(as_lengths(lengths), groups, limits, backward=groups_back, replayed=tuple(sorted(replayed)))
    ops = [op for rank in range(len(forward)) for op in _order(plan, rank, rng)]
    return check(StepPlan(plan.lengths, groups, limits, (tuple(ops),), backward=groups_back, replayed=plan.replayed))


def _launched(rows: list[Row]) -> tuple[MicroBatch, ...]:
    return tuple(MicroBatch(tuple(group), (rank,)) for rank, row in enumerate(rows) for group in row)


def _order(plan: StepPlan, rank: int, rng: random.Random | None) -> list[Op]:
    """The passes of a rank: forwards in launch order; any backward whose sequences are forward through, as it comes."""
    forwards, backwards = list(plan.of_rank(rank)), list(plan.of_rank(rank, "B"))
    if not plan.backward:
        backwards.reverse()
    left = dict(enumerate(plan.lengths.tolist()))
    missing = dict(left)
    ops: list[Op] = []
    while forwards or backwards:
        ready = [j for j in backwards if _is_ready(plan, j, left, missing, ops)]
        if forwards and not (rng and ready and rng.random() < 0.5):
            ops.append(Op("F", forwards.pop(0)))
            for s in plan.micro_batches[ops[-1].micro_batch].slices:
                missing[s.sequence] -= s.length
            continue
        chosen = rng.choice(ready) if rng else ready[0]
        backwards.remove(chosen)
        ops.append(Op("B", chosen))
        for s in plan.passes("B")[chosen].slices:
            left[s.sequence] = s.start
    return ops


def _is_ready(plan: StepPlan, j: int, left: dict[int, int], missing: dict[int, int], ops: list[Op]) -> bool:
    slices = plan.passes("B")[j].slices
    stored_forward = plan.forward_of[j] if slices or plan.backward else j
    ran = stored_forward is None or Op("F", stored_forward) in ops
    return ran and all(not missing[s.sequence] and left[s.sequence] == s.stop for s in slices)
