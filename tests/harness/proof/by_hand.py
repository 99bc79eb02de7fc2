"""Plans written by hand, each for what it has that draws seldom bring together.

`by_hand("slices, half replayed, in step")` is the plan ``slices`` of the table below with two changes of `_CHANGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.rounds import levelled
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

from .drawn import LENGTHS, with_order

Whole = list[Slice]
"""A slice of all of each sequence of `LENGTHS`."""
Groups = list[MicroBatch]
BOTH = "forwards, then backwards"
DRAWN = "drawn"
STAGES = "drawn where there are stages"


def by_hand(
    name: str, *, num_ranks: int = 4, num_stages: int = 1, layers_per_stage: int = 4, heads: int = 0, **more: Any
) -> StepPlan:
    """A checked plan of `LENGTHS`. ``more``: further limits."""
    base, *changes = name.split(", ")
    whole = [Slice(i, 0, n) for i, n in enumerate(LENGTHS)]
    groups, order, *backward = _PLANS[base](whole)
    groups, *backward = (
        [m._replace(ranks=(m.ranks[0] % num_ranks,)) if len(m.ranks) == 1 else m for m in row]
        for row in (groups, *backward)
    )
    limits = Limits(num_ranks, 1 << 20, num_stages, layers_per_stage, heads=heads, **more)
    bare = StepPlan(as_lengths(LENGTHS), tuple(groups), limits, made_by=name)
    if backward:
        known = {m[:2] for m in groups}
        again = tuple(j for j, m in enumerate(*backward) if m[:2] not in known)
        bare = replace(bare, backward=tuple(*backward), replayed=again)
    for change in changes:
        bare = _CHANGES.get(change, lambda plan, change=change: _communicating(plan, change))(bare)
    if order == BOTH or {"in step", "forwards first"} & set(changes):
        bare = forwards_first(bare)
    elif isinstance(order, list):
        bare = forwards_first(bare, order)
    elif order == DRAWN or (order == STAGES and num_stages > 1):
        bare = with_order(bare, np.random.default_rng(1))
    return check(_weights_apart(bare) if "weights apart" in changes else bare)


def forwards_first(plan: StepPlan, backwards: Iterable[int] = ()) -> StepPlan:
    """The plan in one order for all stages: its forwards, then its backwards, these or all in reverse; those of groups
    of their own as they are listed."""
    numbers = range(len(plan.passes("B")))
    backwards = backwards or (numbers if plan.backward else reversed(numbers))
    order = (*(Op("F", i) for i in range(len(plan.micro_batches))), *(Op("B", j) for j in backwards))
    return replace(plan, order=(order,) * plan.limits.num_stages)


def chain(slice_: Slice, count: int) -> list[Slice]:
    """A slice in parts of nearly equal length."""
    borders = [slice_.start + slice_.length * i // count for i in range(count + 1)]
    return [slice_._replace(start=a, stop=b) for a, b in pairwise(borders)]


def _whole(whole: Whole) -> Any:
    """A sequence a micro-batch, on two ranks by turns; two ranks run unequal numbers of them."""
    return [MicroBatch((one,), (i % 2 if i < 6 else 0,)) for i, one in enumerate(whole)], STAGES


def _packs(whole: Whole) -> Any:
    """Packs, unequal numbers of them on the ranks."""
    packs = ((0, (2, 1)), (1, (0, 3)), (2, (4, 6)), (0, (5,)), (3, (7,)))
    return [_on(rank, *(whole[i] for i in numbers)) for rank, numbers in packs], STAGES


def _slices(whole: Whole) -> Any:
    """Sixteen slices of a sequence on a rank and five on another, with whole sequences between and beside them."""
    first = [[piece] for piece in chain(whole[1], 16)]
    for at, sequence in ((0, 2), (5, 3), (15, 7)):
        first[at].append(whole[sequence])
    second = [*([piece] for piece in chain(whole[4], 5)), [whole[5], whole[6]]]
    second[2].insert(0, whole[0])
    return [_on(rank, *pieces) for rank, row in enumerate((first, second)) for pieces in row], BOTH


def _regrouped(whole: Whole) -> Any:
    """Other cuts in the backward: sixteen slices for four, a whole sequence in slices; one micro-batch is as it was."""
    forward = [_on(0, piece) for piece in chain(whole[1], 4)]
    forward += [_on(0, whole[2], whole[3]), _on(1, whole[4]), _on(1, whole[0], whole[5]), _on(1, whole[6], whole[7])]
    backward = [_on(0, whole[2], whole[3]), *(_on(0, piece) for piece in reversed(chain(whole[1], 16)))]
    backward += [_on(1, piece) for piece in reversed(chain(whole[4], 5))]
    backward += [_on(1, whole[7], whole[0]), _on(1, whole[6], whole[5])]
    return forward, BOTH, backward


def _shared_regrouped(whole: Whole) -> Any:
    """A rank has other groups in the backward, while what others share stays."""
    ring = [MicroBatch((piece,), (0, 1, 3), cp_comm="ring") for piece in chain(whole[1], 2)]
    forward = [*ring, _on(2, whole[0], whole[2]), _on(2, whole[3], whole[4]), _on(2, *whole[5:])]
    first, second = chain(whole[0], 2)
    backward = [ring[1], _on(2, whole[7], whole[2], whole[3]), _on(2, second), _on(2, first), ring[0]]
    return forward, BOTH, [*backward, _on(2, whole[5], whole[4]), _on(2, whole[6])]


def _mixed(cp_comm: Any) -> Callable[[Whole], Any]:
    """Jobs on {0,1,3}, {2}, {3,1,2}, {0,2} and all four; every rank runs another number of them."""

    def on(ranks: tuple[int, ...], *slices: Slice) -> MicroBatch:
        if len(ranks) == 1:
            return MicroBatch(slices, ranks)
        if cp_comm == "hybrid" and len(ranks) == 4:  # groups of two divide four ranks only; the others are a ring then
            return MicroBatch(slices, ranks, cp_comm="hybrid", ulysses_degree=2)
        return MicroBatch(slices, ranks, cp_comm="ring" if cp_comm == "hybrid" else cp_comm)

    def plan(whole: Whole) -> Any:
        first = [on((0, 1, 3), whole[0], whole[5]), on((2,), whole[6]), on((3, 1, 2), whole[2])]
        return [*first, on((0, 2), whole[3], whole[7]), on((2, 0, 3, 1), whole[1], whole[4])], STAGES

    return plan


def _zones(whole: Whole) -> Any:
    """One micro-batch of long sequences on many ranks and short ones on one, as Zeppelin has it."""
    cp_groups = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 1), (3, 2), (1, 3, 0), (2,), (2,), (0,))
    return [MicroBatch(tuple(whole), (0, 1, 2, 3), cp_comm="ring", cp_groups=cp_groups)], STAGES


def _chain(whole: Whole) -> Any:
    """A sequence in slices on three ranks beside short ones on one, and in their last pack together."""
    ranks = (2, 0, 3)
    last = MicroBatch((Slice(1, 40, 64), whole[5]), (0, 2, 3), cp_comm="ring", cp_groups=((2, 0, 3), (3,)))
    groups = [MicroBatch((Slice(1, 0, 24),), ranks, cp_comm="ring"), _on(1, whole[0], whole[6])]
    groups += [MicroBatch((Slice(1, 24, 40), whole[4]), ranks, cp_comm="all_gather"), _on(0, whole[7], whole[3])]
    return [*groups, last, _on(1, whole[2])], DRAWN


def _growth(whole: Whole) -> Any:
    """A sequence that starts on one rank and grows to three, then four."""
    first, second, third = Slice(1, 0, 20), Slice(1, 20, 44), Slice(1, 44, 64)
    groups = [_on(1, first, whole[6]), MicroBatch((whole[0],), (3, 0), cp_comm="all_to_all")]
    groups += [MicroBatch((second,), (1, 2, 0), cp_comm="ring"), _on(3, whole[2], whole[7])]
    return [*groups, MicroBatch((third, whole[4]), (3, 1, 0, 2), cp_comm="ring"), _on(2, whole[3], whole[5])], DRAWN


def _pairs(whole: Whole) -> Any:
    """For a plane of two: shared and lonely micro-batches by turns, one sequence in slices."""
    first, second = Slice(1, 0, 40), Slice(1, 40, 64)
    groups = [MicroBatch((first, whole[7]), (1, 0), cp_comm="ring"), _on(0, whole[0]), _on(1, whole[2], whole[5])]
    groups += [MicroBatch((second,), (1, 0), cp_comm="ring")]
    return [*groups, MicroBatch((whole[3], whole[4]), (0, 1), cp_comm="all_to_all"), _on(1, whole[6])], DRAWN


def _together(whole: Whole) -> Any:
    """Every rank of two in every micro-batch, so that stages may leave the order to Megatron's 1F1B."""
    kinds: tuple[Any, ...] = ("ring", "all_gather", "all_to_all", "ring")
    numbers = ((1, 7), (0, 5), (4,), (2, 3, 6))
    return [
        MicroBatch(tuple(whole[i] for i in own), (1, 0), cp_comm=cp_comm)
        for cp_comm, own in zip(kinds, numbers, strict=True)
    ], ""


def _crossed(whole: Whole) -> Any:
    """Equal counts and launches in step, yet in the backward the shared one is rank 0's first and rank 1's last."""
    groups = [_on(0, whole[0]), _on(1, whole[2], whole[3]), MicroBatch((whole[1],), (0, 1), cp_comm="ring")]
    groups += [_on(2, whole[4]), _on(3, whole[5]), _on(2, whole[6]), _on(3, whole[7])]
    return groups, [1, 2, 0, 3, 4, 5, 6]


def _on(rank: int, *slices: Slice) -> MicroBatch:
    return MicroBatch(slices, (rank,))


_PLANS: dict[str, Callable[[Whole], Any]] = {
    "whole": _whole,
    "packs": _packs,
    "slices": _slices,
    "regrouped": _regrouped,
    "regrouped beside shared": _shared_regrouped,
    "zones": _zones,
    "chain": _chain,
    "growth": _growth,
    "pairs": _pairs,
    "together": _together,
    "crossed": _crossed,
    **{cp_comm: _mixed(cp_comm) for cp_comm in ("ring", "all_gather", "all_to_all", "hybrid")},
}
"""Each gives the micro-batches, their order (one of the three above, or the order of the backwards behind all forwards;
empty: the host's own), and the groups of the backward where it has other ones."""


def _communicating(plan: StepPlan, cp_comm: Any) -> StepPlan:
    """What ranks share in a ring they share in another way."""
    return _each_shared(plan, lambda m: m._replace(cp_comm=cp_comm) if m.cp_comm == "ring" else m)


def _each(plan: StepPlan, change: Callable[[MicroBatch], MicroBatch]) -> StepPlan:
    return replace(plan, micro_batches=tuple(map(change, plan.micro_batches)))


def _each_shared(plan: StepPlan, change: Callable[[MicroBatch], MicroBatch]) -> StepPlan:
    return _each(plan, lambda m: change(m) if len(m.ranks) > 1 else m)


def _replayed(every: int) -> Callable[[StepPlan], StepPlan]:
    """Of the micro-batches that each rank runs backward, every so many are replayed."""

    def changed(plan: StepPlan) -> StepPlan:
        rows = [plan.of_rank(rank, "B") for rank in range(plan.limits.num_ranks)]
        return replace(plan, replayed=tuple(sorted({*plan.replayed, *(j for row in rows for j in row[::every])})))

    return changed


def _in_step(plan: StepPlan) -> StepPlan:
    """All ranks run passes of one kind together, dummies where one has nothing to run."""
    micro_batches = tuple(levelled(plan.micro_batches, plan.limits.num_ranks))
    return replace(plan, micro_batches=micro_batches, limits=replace(plan.limits, all_in_step=True))


def _weights_apart(plan: StepPlan) -> StepPlan:
    """Every weight gradient is a pass of its own, two passes behind its backward or later."""
    orders = []
    for ops in plan.order:
        row = [*ops, *(Op("W", op.micro_batch) for op in ops if op.kind == "B")]
        late = {op: place + 2.5 for place, op in enumerate(ops)}
        orders.append(
            tuple(sorted(row, key=lambda op: late[Op("B", op.micro_batch)] if op.kind == "W" else late[op] - 2.5))
        )
    return replace(plan, order=tuple(orders), limits=replace(plan.limits, splits_backward=True))


_CHANGES: dict[str, Callable[[StepPlan], StepPlan]] = {
    "remap": lambda plan: _each_shared(plan, lambda m: m._replace(remap=True)),
    "routed": lambda plan: _each_shared(plan, lambda m: m._replace(routed=True)),
    "half replayed": _replayed(2),
    "all replayed": _replayed(1),
    "in step": _in_step,
    "padded": lambda plan: _each(plan, lambda m: m._replace(pad_to=max(s.length for s in m.slices))),
    "idle": lambda plan: _each(plan, lambda m: m._replace(ranks=(0,))),
    "forwards first": lambda plan: plan,
    "offloaded": lambda plan: replace(plan, offload=tuple(i % 3 / 2 for i in range(len(plan.micro_batches)))),
    "weights apart": lambda plan: plan,
}
"""``idle``: of all ranks but the first. Orders come last, and after them ``weights apart``."""
