"""What one rank runs of a plan, and in which order; pure functions of the plan.

A plan's ``F i`` becomes a forward, with gradients if its activations are kept for a backward and without otherwise. Its
``B j`` becomes the backward of the kept forward, or, where j is replayed, a forward with gradients and its backward. A
forward without gradients runs only the slices whose keys and values a replay will read: with one pipeline stage nothing
else is wanted of it.

Under ZeRO 3 parameters are gathered in every forward and every backward, by all ranks: all must run one sequence of
forwards and backwards (whether a forward keeps gradients makes no difference to its gathers). `in_step` brings any plan
into that form; where a rank has no pass of its own it runs a dummy, one token of no weight.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import Literal, NamedTuple

from ...core.errors import EvenloadError
from ...core.order import orders_of_stage
from ...core.workload import MicroBatch, Op, Slice, StepPlan

DUMMY = MicroBatch((), ())
"""Stands for: run one token of no weight, so that the engine does what its peers do."""

_BOTH: tuple[Literal["F", "B"], ...] = ("F", "B")

Kind = Literal["forward", "prefix", "replay", "backward"]


class Pass(NamedTuple):
    """One pass of a rank."""

    kind: Kind
    """forward: with gradients, its loss counts. prefix: without gradients; only keys and values are wanted of it.
    replay: a forward with gradients right before its backward, after a prefix pass; its loss counts. backward."""
    micro_batch: MicroBatch
    graph: int
    """Ties a backward to its forward or replay; a prefix pass has none and carries -1."""
    number: int = -1
    """Which micro-batch of its direction it is in the plan; -1: a dummy that the plan does not have."""

    @property
    def is_backward(self) -> bool:
        return self.kind == "backward"


def passes_of_rank(plan: StepPlan, rank: int, num_ranks: int, *, equal: bool) -> tuple[Pass, ...]:
    """The passes of a rank in the order in which it runs them; at least one forward with its backward.

    With `equal` (ZeRO 3) the ranks run forwards and backwards in one sequence, dummies where a rank has none.

    Raises:
        EvenloadError: the plan asks for what DeepSpeed cannot run.
    """
    _refuse_unsupported(plan, num_ranks)
    orders, read = orders_of_stage(plan, 0), _read_by_replays(plan)
    if equal:
        return in_step([_planned(plan, ops, read) for ops in orders])[rank]
    return _planned(plan, orders[rank], read) or (Pass("forward", DUMMY, 0), Pass("backward", DUMMY, 0))


def in_step(rows: Row[Row[Pass]]) -> tuple[tuple[Pass, ...], ...]:
    """The same passes of every rank, with dummies between them so that all ranks meet in the same kind of pass.

    Forwards go first: a backward starts when no rank has a forward to run before its next backward. A rank never holds
    more activations than in the plan but those of dummies, and rows that are in step already stay as they are. Cost:
    O(ranks * passes); 1,024 ranks of 40 passes take 0.1 s.
    """
    if len({tuple(one.is_backward for one in row) for row in rows}) == 1:
        return tuple(map(tuple, rows))
    at = [0] * len(rows)
    found: list[list[Pass]] = [[] for _ in rows]
    spare: list[list[int]] = [[] for _ in rows]
    graph = max((one.graph for row in rows for one in row), default=-1)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        heads = [row[place] if place < len(row) else None for place, row in zip(at, rows, strict=True)]
        forward = any(head is not None and not head.is_backward for head in heads)
        if not forward and any(head is None and not spare[rank] for rank, head in enumerate(heads)):
            # A rank has no graph left for a dummy backward: all run one dummy forward more.
            forward, heads = True, [None] * len(rows)
        graph += 1
        for rank, head in enumerate(heads):
            if head is not None and head.is_backward != forward:
                found[rank].append(head)
                at[rank] += 1
            elif forward:
                found[rank].append(Pass("forward", DUMMY, graph))
                spare[rank].append(graph)
            else:
                found[rank].append(Pass("backward", DUMMY, spare[rank].pop()))
    return tuple(tuple(_without_graph(one, set(left)) for one in row) for row, left in zip(found, spare, strict=True))


def num_added(plan: StepPlan, rank: int, passes: Row[Pass]) -> int:
    """By how many passes a rank runs more than the plan has for it, to stay in step with its peers."""
    replays = sum(one.kind == "replay" for one in passes)
    return max(0, len(passes) - replays - sum(len(plan.of_rank(rank, kind)) for kind in _BOTH))


def _without_graph(one: Pass, never_used: set[int]) -> Pass:
    return Pass("prefix", one.micro_batch, -1, one.number) if one.graph in never_used else one


def _planned(plan: StepPlan, ops: Row[Op], read: frozenset[Slice]) -> tuple[Pass, ...]:
    """The passes of one rank as the plan has them; `read` is `_read_by_replays`'s answer."""
    forward, backward = plan.passes("F"), plan.passes("B")
    row: list[Pass] = []
    for kind, index in ops:
        if kind == "F":
            micro_batch = forward[index]
            wanted = tuple(s for s in micro_batch.slices if s in read)
            if index in plan.kept:
                row.append(Pass("forward", micro_batch, index, index))
            elif wanted:
                row.append(Pass("prefix", micro_batch._replace(slices=wanted), -1, index))
            continue
        graph = plan.forward_of[index]
        if graph is None:
            # Replays count on from the forwards, so that no two graphs of a rank have one number.
            graph = len(forward) + index
            row.append(Pass("replay", backward[index], graph, index))
        row.append(Pass("backward", backward[index], graph, index))
    return tuple(row)


def _read_by_replays(plan: StepPlan) -> frozenset[Slice]:
    """Forward slices whose keys and values some replay reads and does not write itself.

    The backward of a sequence starts with its last slice. A replay of that one writes its own keys and values, so
    forward slices from its start on may be left out, if one of them starts right there.
    """
    if len(plan.kept) == len(plan.micro_batches):
        return frozenset()
    last: dict[int, int] = {}
    for micro_batch in plan.passes("B"):
        for s in micro_batch.slices:
            last[s.sequence] = max(s.start, last.get(s.sequence, 0))
    pieces = frozenset(s for m in plan.micro_batches for s in m.slices)
    met = {s.sequence for s in pieces if s.start == last[s.sequence]}
    return frozenset(s for s in pieces if s.start < last[s.sequence] or s.sequence not in met)


def _refuse_unsupported(plan: StepPlan, num_ranks: int) -> None:
    found = ""
    if plan.limits.num_ranks != num_ranks:
        found = f"a plan for {plan.limits.num_ranks} ranks in a world of {num_ranks}"
    elif any(len(m.ranks) != 1 for m in (*plan.micro_batches, *plan.backward)):
        found = "a micro-batch shared by several ranks"
    elif any(layers for row in plan.recompute for layers in row):
        found = "layers to recompute in single micro-batches"
    elif len(plan.order) > 1:
        found = f"an order for {len(plan.order)} pipeline stages"
    if found:
        raise EvenloadError(
            "trainer deepspeed cannot run this plan",
            found,
            "plan for the ranks there are, one rank for each micro-batch, and set train.recompute for recomputation",
        )


def into_exactly(plan: StepPlan, count: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """`count` micro-batches for every rank, dummies where the plan has fewer: ``result[rank][k]``.

    For trainers whose number of micro-batches a step is fixed (``gradient_accumulation_steps``).

    Raises:
        EvenloadError: a rank has more.
    """
    mine = [[plan.micro_batches[i] for i in plan.of_rank(rank)] for rank in range(plan.limits.num_ranks)]
    most = max(map(len, mine))
    if most > count:
        raise EvenloadError(
            "the batch does not fit into the micro-batches of a step",
            f"{plan.num_tokens} tokens on {plan.limits.num_ranks} ranks need {most} micro-batches of "
            f"{plan.limits.max_tokens} tokens, gradient_accumulation_steps is {count}",
            f"raise gradient_accumulation_steps to {most}, or packing.max_tokens",
        )
    return tuple(tuple(m) + (DUMMY,) * (count - len(m)) for m in mine)
