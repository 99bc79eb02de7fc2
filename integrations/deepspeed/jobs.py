"""What one rank runs of a plan, and in which order; pure functions of the plan.

A plan's ``F i`` becomes a forward, with gradients if its activations are kept for a backward and without otherwise. Its
``B j`` becomes the backward of the kept forward, or, where j is replayed, a forward with gradients and its backward. A
forward without gradients runs only the slices whose keys and values a replay will read: with one pipeline stage nothing
else is wanted of it. (A micro-batch that ranks share runs whole, as fewer slices might leave a rank without a token.)

Under ZeRO 3 all ranks meet in every pass; `passes.in_step` brings any plan into that form.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import Literal

from ...core.errors import EvenloadError
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import MicroBatch, Op, Slice, StepPlan
from .passes import DUMMY, Pass, in_step

_BOTH: tuple[Literal["F", "B"], ...] = ("F", "B")


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


def num_added(plan: StepPlan, rank: int, passes: Row[Pass]) -> int:
    """By how many passes a rank runs more than the plan has for it, to stay in step with its peers."""
    replays = sum(one.kind == "replay" for one in passes)
    return max(0, len(passes) - replays - sum(len(plan.of_rank(rank, kind)) for kind in _BOTH))


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
                whole = len(micro_batch.ranks) > 1
                row.append(Pass("prefix", micro_batch if whole else micro_batch._replace(slices=wanted), -1, index))
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
    elif any(len(m.ranks) > 1 and not m.cp_comm for m in (*plan.micro_batches, *plan.backward)):
        found = "a micro-batch on several ranks that names no engine (static context parallelism)"
    elif len(plan.order or plan.recompute) > 1:
        found = f"a plan for {len(plan.order or plan.recompute)} pipeline stages"
    elif any(plan.split):
        found = "weight gradients as passes of their own, which one stage's engine computes in its backwards"
    if found:
        raise EvenloadError(
            "trainer deepspeed cannot run this plan",
            found,
            "plan for the ranks there are, and share sequences by plugins.mesh",
        )


def into_exactly(plan: StepPlan, count: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """`count` micro-batches for every rank, dummies where the plan has fewer: ``result[rank][k]``.

    For trainers whose number of micro-batches a step is fixed (``gradient_accumulation_steps``).

    Raises:
        EvenloadError: a rank has more, or shares one with others, or layers are to be recomputed.
    """
    if any(layers for row in plan.recompute for layers in row):
        raise EvenloadError(
            "a training loop of your own decides itself what is recomputed",
            f"a plan made by {plan.made_by or 'hand'} that says it by micro-batch",
            "set plugins.pipeline.recompute=off, or use `evenload train`",
        )
    if plan.shared:
        raise EvenloadError(
            "a training loop of your own runs every micro-batch on one rank",
            f"a plan made by {plan.made_by or 'hand'} that shares micro-batches",
            "plan under limits.whole_sequences, or use `evenload train`",
        )
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
