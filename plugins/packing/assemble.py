"""Micro-batches of every rank into a plan: launch order, order of passes, replays under the memory cap.

Micro-batches of a rank that share a sequence, forward or backward, form a *chain*: all its forwards run before all its
backwards, forwards ascending and backwards descending, so that prefix KV and its gradients are there when needed. One
chain follows the other, which keeps few activations alive: a micro-batch of whole sequences is a chain by itself (F B).
With pipeline stages the same two orders run in 1F1B slots (`core.order.in_slots`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ...core.balance.joined import Joined
from ...core.plan.limits import Limits
from ...core.plan.order import in_slots, in_turn
from ...core.plan.step_plan import MicroBatch, Op, StepPlan
from .slicing import Packs


class _Rank(NamedTuple):
    forward: list[int]
    backward: list[int]
    need: list[int]
    """Forwards that precede each backward."""
    chains: list[tuple[list[int], list[int]]]


def assemble(
    incoming: StepPlan,
    limits: Limits,
    forward: list[Packs],
    backward: list[Packs] | None = None,
    made_by: str = "packing",
) -> StepPlan:
    """The plan of ``forward[r][k]``, micro-batch k of rank r in launch order (an empty one is a dummy).

    ``backward[r]`` groups the same tokens anew, in backward launch order; None, or the same groups on every rank, runs
    backward what ran forward.
    """
    if limits.all_in_step:
        forward = _equal(forward)
        backward = _equal(backward) if backward else None
    if backward and all(_same(f, b) for f, b in zip(forward, backward, strict=True)):
        backward = None
    forward = [packs or [[]] for packs in forward]
    micro_batches, numbers = _launch_order(forward)
    plan = incoming.with_micro_batches(micro_batches, limits, made_by)
    if backward is None:
        if not plan.cut:
            return plan
        ranks = [_in_chains(packs, packs, reverse=True) for packs in forward]
        back_numbers = numbers
    else:
        backward = [packs or [[]] for packs in backward]
        back_micro_batches, back_numbers = _launch_order(backward)
        plan = replace(plan, backward=back_micro_batches, made_by=f"{made_by} (asymmetric)")
        ranks = [_in_chains(f, b, reverse=False) for f, b in zip(forward, backward, strict=True)]
        # Where ranks must keep in step, all replay or none.
        same = set() if limits.all_in_step else {m[:2] for m in micro_batches}
        plan = replace(plan, replayed=tuple(j for j, m in enumerate(plan.backward) if m[:2] not in same))
    if limits.all_in_step:
        # All forwards, then all backwards: the one pattern that every rank can run in step with the others.
        ranks = [rank._replace(need=[len(rank.forward)] * len(rank.backward)) for rank in ranks]
    order = (
        tuple(
            Op(op.kind, (numbers if op.kind == "F" else back_numbers)[r][op.micro_batch])
            for r, rank in enumerate(ranks)
            for op in in_slots(rank.forward, rank.backward, rank.need, limits.num_stages - 1 - stage)
        )
        for stage in range(limits.num_stages)
    )
    return replace(plan, order=tuple(order))


def chains_of_rank(plan: StepPlan, rank: int) -> list[list[int]]:
    """The chains of a rank of a symmetric plan, each its micro-batches in forward order."""
    numbers = plan.of_rank(rank)
    packs = [list(plan.micro_batches[i].slices) for i in numbers]
    return [[numbers[k] for k in forward] for forward, _ in _in_chains(packs, packs, reverse=True).chains]


def _same(forward: Packs, backward: Packs) -> bool:
    return {tuple(sorted(pack)) for pack in forward} == {tuple(sorted(pack)) for pack in backward}


def _equal(packs: list[Packs]) -> list[Packs]:
    count = max(1, *map(len, packs))
    return [of_rank + [[]] * (count - len(of_rank)) for of_rank in packs]


def _launch_order(packs: list[Packs]) -> tuple[tuple[MicroBatch, ...], list[list[int]]]:
    """Launch order: the k-th micro-batch of every rank, then the next of every rank; and ``numbers[rank][k]``."""
    numbers: list[list[int]] = [[] for _ in packs]
    micro_batches = tuple(MicroBatch(tuple(pack), (rank,)) for rank, pack in in_turn(packs))
    for number, micro_batch in enumerate(micro_batches):
        numbers[micro_batch.ranks[0]].append(number)
    return micro_batches, numbers


def _in_chains(forward: Packs, backward: Packs, *, reverse: bool) -> _Rank:
    """Chains by shared sequences; ``reverse`` runs a chain's backwards in the reverse order of their numbers."""
    if len(forward) == len(backward) == 1:
        return _Rank([0], [0], [1], [([0], [0])])
    joined = Joined(len(forward) + len(backward))
    owner: dict[int, int] = {}
    for number, pack in enumerate((*forward, *backward)):
        joined.join([number, *(owner.setdefault(s.sequence, number) for s in pack)])
    chains: dict[int, tuple[list[int], list[int]]] = {}
    empties = [k for k, pack in enumerate(backward) if not pack]
    for k, pack in enumerate(forward):
        chain = chains.setdefault(joined.first(k), ([], []))
        chain[0].append(k)
        if not pack and empties:  # a dummy is a chain by itself
            chain[1].append(empties.pop(0))
    for k, pack in enumerate(backward):
        if pack:
            chains[joined.first(len(forward) + k)][1].append(k)
    rows = [(f, b[::-1] if reverse else b) for f, b in chains.values()]
    rows[-1][1].extend(empties)
    ends = accumulate(len(f) for f, _ in rows)
    need = [end for end, (_, b) in zip(ends, rows, strict=True) for _ in b]
    return _Rank([k for f, _ in rows for k in f], [k for _, b in rows for k in b], need, rows)
