"""Lawful plans for 4 ranks in which ranks share micro-batches, by hand and at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.runtime.attention.labels import Labels
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights

LENGTHS = (150, 83, 9, 13, 22, 5, 61, 1)
HEADS = 4


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


def piece(sequence: int, part: int = 0, parts: int = 1) -> Slice:
    """One of several nearly equal slices of a sequence."""
    length = LENGTHS[sequence]
    return Slice(sequence, part * length // parts, (part + 1) * length // parts)


def local(rank: int, *ids: int) -> MicroBatch:
    return MicroBatch(tuple(piece(i) for i in ids), (rank,))


def shared(ids: tuple[int, ...], ranks: tuple[int, ...], cp_comm: Any, **more: Any) -> MicroBatch:
    return MicroBatch(tuple(piece(i) for i in ids), ranks, cp_comm=cp_comm, **more)


def mixed(cp_comm: Any = "ring", equal: bool = False) -> StepPlan:
    """All ranks, then {3, 0, 1} beside micro-batches of rank 2 alone; ranks run different numbers of micro-batches."""
    three = "ring" if cp_comm == "hybrid" else cp_comm
    everyone = shared((0,), (0, 1, 2, 3), cp_comm, ulysses_degree=2 if cp_comm == "hybrid" else 0)
    groups = [everyone, local(2, 3), shared((1, 2), (3, 0, 1), three), local(2, 4), local(0, 5), local(2, 6, 7)]
    if not equal:
        return ordered(LENGTHS, groups)
    # The shared one is the second pass of all its ranks, rank 2 has one of its own meanwhile.
    groups = [everyone, local(2, 3, 4), shared((1, 2), (3, 0, 1), three), local(0, 5), local(1, 6), local(2, 7)]
    return ordered(LENGTHS, [*groups, MicroBatch((), (3,))], equal=True)


def cp_groups(cp_comm: Any = "ring", remap: bool = False, routed: bool = False) -> StepPlan:
    """One micro-batch on all ranks: the longest on all, one on {3, 1}, short ones on one rank."""
    zones = ((0, 1, 2, 3), (3, 1), (2,), (2,), (0,), (0,), (1, 2, 0), (3,))
    one = shared(tuple(range(8)), (0, 1, 2, 3), cp_comm, cp_groups=zones, remap=remap, routed=routed)
    return ordered(LENGTHS, [one], node_ranks=2)


def chains(replayed: str = "none") -> StepPlan:
    """Slices on 3 ranks: a ring that grows by a rank, heads that stay; `replayed`: none, some or all micro-batches."""
    groups = [
        MicroBatch((piece(0, 0, 3), piece(2)), (0, 3), cp_comm="ring"),
        MicroBatch((piece(1, 0, 2),), (1, 2, 3), cp_comm="all_to_all"),
        MicroBatch((piece(0, 1, 3),), (3, 1, 0), cp_comm="ring"),
        local(2, 4),
        MicroBatch((piece(0, 2, 3), piece(3)), (3, 1, 0), cp_comm="ring", cp_groups=((3, 1, 0), (1,))),
        MicroBatch((piece(1, 1, 2),), (1, 2, 3), cp_comm="all_to_all"),
        MicroBatch((piece(6, 0, 2),), (2,)),
        MicroBatch((piece(6, 1, 2), piece(5), piece(7)), (2,)),
    ]
    step = {"none": 0, "some": 2, "all": 1}[replayed]
    return ordered(LENGTHS, groups, again=[j for j in range(len(groups)) if step and j % step == 0])


def regrouped() -> StepPlan:
    """Backward rank 2 has other groups than forward, while the shared ones stay; one of them is replayed."""
    first = [MicroBatch((piece(0, k, 2),), (0, 1, 3), cp_comm="ring") for k in (0, 1)]
    forward = [*first, local(2, 1, 2), local(2, 3, 4), local(2, 5, 6, 7)]
    halves = [MicroBatch((piece(1, k, 2),), (2,)) for k in (1, 0)]
    backward = [first[1], local(2, 7, 2, 3), *halves, first[0], local(2, 5, 4), local(2, 6)]
    return ordered(LENGTHS, forward, backward=backward, again=[4])


def even(cp_comm: Any = "ring") -> StepPlan:
    """Three ranks with equally many tokens each, and one alone."""
    whole = [Slice(i, 0, n) for i, n in enumerate((96, 31))]
    return ordered((96, 31), [MicroBatch((whole[0],), (0, 1, 2), cp_comm=cp_comm), MicroBatch((whole[1],), (3,))])


def offloaded() -> StepPlan:
    """Activations of some micro-batches would wait in host memory."""
    made = mixed("ring")
    return check(replace(made, offload=(0.5, 0.0, 1.0, 0.0, 0.0, 0.25)))


def crossed() -> StepPlan:
    """Equal counts and launches in step, yet backward the shared one is the first of rank 0 and the last of rank 1."""
    groups = [local(0, 1), local(1, 2, 3), shared((0,), (0, 1), "ring"), local(2, 4), local(3, 5)]
    groups += [local(2, 6), local(3, 7)]
    made = ordered(LENGTHS, groups)
    forwards = tuple(op for op in made.order[0] if op.kind == "F")
    backwards = tuple(Op("B", j) for j in (1, 2, 0, 3, 4, 5, 6))
    return check(StepPlan(made.lengths, made.micro_batches, made.limits, (forwards + backwards,)))


def random_plan(seed: int) -> StepPlan:
    """Anything lawful: ranks, cp_comm types, CP groups, cuts, order, kept or replayed."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice((1, rng.randint(2, 20), rng.randint(20, 60))) for _ in range(rng.randint(3, 8))) + (50,)
    left = [_cuts(i, n, rng) for i, n in enumerate(lengths)]
    chosen = [_chosen(rng) for _ in lengths]
    groups: list[MicroBatch] = []
    while any(left):
        ready = [i for i, pieces in enumerate(left) if pieces]
        first = rng.choice(ready)
        uncut = [i for i in ready if left[i][0].length == lengths[i] and i != first]
        taken = [first, *rng.sample(uncut, min(len(uncut), rng.randint(0, 2)))]
        groups.append(_group([left[i].pop(0) for i in taken], chosen[first], rng))
    again = [j for j in range(len(groups)) if rng.random() < 0.4] if rng.random() < 0.7 else []
    return ordered(lengths, groups, again=again, rng=rng)


def _cuts(sequence: int, length: int, rng: random.Random) -> list[Slice]:
    """A sequence whole or in slices that leave every rank a token."""
    count = rng.choice((1, 1, 2, 3)) if length >= 40 else 1
    borders = [length * k // count for k in range(count + 1)]
    return [Slice(sequence, a, b) for a, b in pairwise(borders)]


def _chosen(rng: random.Random) -> dict[str, Any]:
    ranks = tuple(rng.sample(range(4), rng.choice((1, 2, 3, 3, 4, 4))))
    cp_comm = rng.choice(("ring", "all_gather", "all_to_all", "hybrid")) if len(ranks) > 1 else ""
    if cp_comm == "hybrid" and len(ranks) != 4:
        cp_comm = "ring"
    return {"ranks": ranks, "cp_comm": cp_comm, "ulysses_degree": 2 if cp_comm == "hybrid" else 0}


def _group(pieces: list[Slice], chosen: dict[str, Any], rng: random.Random) -> MicroBatch:
    """A micro-batch whose first slice is on all its ranks, so that a chain stays where it is."""
    ranks, found = chosen["ranks"], MicroBatch(tuple(pieces), **chosen)
    if len(ranks) > 1 and chosen["cp_comm"] != "hybrid" and rng.random() < 0.4:
        zones = (ranks, *(tuple(rng.sample(ranks, rng.randint(1, len(ranks)))) for _ in pieces[1:]))
        found = found._replace(cp_groups=zones)
    if len(ranks) > 1:
        found = found._replace(remap=rng.random() < 0.3, routed=rng.random() < 0.3)
    alone = found._replace(slices=tuple(Slice(k, 0, p.length) for k, p in enumerate(pieces)))
    try:
        check(StepPlan(as_lengths([p.length for p in pieces]), (alone,), _limits()))
    except PlanError:  # too few tokens for its ranks, which slices of a chain never have
        return MicroBatch(tuple(pieces), ranks[:1])
    return found


def _limits(equal: bool = False, node_ranks: int = 2) -> Limits:
    return Limits(4, 10**6, all_in_step=equal, heads=HEADS, node_ranks=node_ranks)


def ordered(
    lengths: Any,
    groups: list[MicroBatch],
    *,
    backward: list[MicroBatch] | None = None,
    again: Any = (),
    equal: bool = False,
    node_ranks: int = 0,
    rng: random.Random | None = None,
) -> StepPlan:
    """The checked plan; one global order of passes: forwards, then backwards in reverse, or any order by `rng`."""
    batch, limits, back = as_lengths(lengths), _limits(equal, node_ranks), tuple(backward or ())
    known = {m[:2] for m in groups}
    replayed = tuple(sorted({j for j, m in enumerate(back) if m[:2] not in known} | set(again)))
    bare = StepPlan(batch, tuple(groups), limits, backward=back, replayed=replayed)
    forwards = [Op("F", i) for i in range(len(groups))]
    backwards = [Op("B", j) for j in range(len(back or groups))]
    if not back:
        backwards.reverse()
    missing = dict(enumerate(batch.tolist()))
    left, ops = dict(missing), []
    while forwards or backwards:
        ready = [op for op in backwards if _is_ready(bare, op, missing, left, ops)]
        if forwards and not (rng and ready and rng.random() < 0.5):
            ops.append(forwards.pop(0))
            for s in groups[ops[-1].micro_batch].slices:
                missing[s.sequence] -= s.length
            continue
        ops.append(rng.choice(ready) if rng else ready[0])
        backwards.remove(ops[-1])
        for s in bare.passes("B")[ops[-1].micro_batch].slices:
            left[s.sequence] = s.start
    return check(StepPlan(batch, tuple(groups), limits, (tuple(ops),), backward=back, replayed=replayed))


def _is_ready(plan: StepPlan, op: Op, missing: dict[int, int], left: dict[int, int], ops: list[Op]) -> bool:
    slices, stored_forward = plan.passes("B")[op.micro_batch].slices, plan.forward_of[op.micro_batch]
    ran = Op("F", op.micro_batch if stored_forward is None else stored_forward) in ops if not plan.backward else True
    return ran and all(not missing[s.sequence] and left[s.sequence] == s.stop for s in slices)


def named(name: str) -> StepPlan:
    """``random 7``, or a function of this module with its arguments: ``mixed hybrid equal``."""
    kind, *words = name.split()
    if kind == "random":
        return random_plan(int(words[0]))
    flags = {word: True for word in words if word in ("equal", "remap", "routed")}
    return globals()[kind](*(word for word in words if word not in flags), **flags)
