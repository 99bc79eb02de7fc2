"""What one rank runs of a plan, and in which order; pure functions of the plan."""

from __future__ import annotations

from ...core.errors import EvenloadError
from ...core.workload import MicroBatch, Op, StepPlan

DUMMY = MicroBatch((), ())
"""Stands for: run one token of no weight, so that the engine does what its peers do."""


def jobs_of_rank(
    plan: StepPlan, rank: int, num_ranks: int, *, equal: bool
) -> tuple[tuple[MicroBatch, ...], tuple[Op, ...]]:
    """The micro-batches of a rank and the order of their passes; `Op.micro_batch` counts within the first.

    A rank without work gets a dummy; with `equal` (ZeRO 3) every rank gets as many as the busiest one.

    Raises:
        EvenloadError: the plan asks for what this form of the integration does not run.
    """
    _refuse_unsupported(plan, num_ranks)
    mine = plan.of_rank(rank)
    counts = [len(plan.of_rank(r)) for r in range(num_ranks)]
    wanted = max(1, *counts) if equal else max(1, len(mine))
    micro_batches = tuple(plan.micro_batches[i] for i in mine) + (DUMMY,) * (wanted - len(mine))
    if not plan.order:
        return micro_batches, tuple(Op(kind, i) for i in range(wanted) for kind in ("F", "B"))
    place = {index: i for i, index in enumerate(mine)}
    order = [Op(op.kind, place[op.micro_batch]) for op in plan.order[0] if op.micro_batch in place]
    if equal and len({_kinds(plan, r) for r in range(num_ranks)}) > 1:
        raise EvenloadError(
            "under ZeRO 3 every rank must run the same order of forwards and backwards",
            "; ".join(f"rank {r}: {_kinds(plan, r)}" for r in range(min(num_ranks, 4))),
            "give every rank the same number of micro-batches in the same order, or use ZeRO 0, 1 or 2",
        )
    order += [Op(kind, i) for i in range(len(mine), wanted) for kind in ("F", "B")]
    return micro_batches, tuple(order)


def _kinds(plan: StepPlan, rank: int) -> str:
    mine = set(plan.of_rank(rank))
    return "".join(op.kind for op in plan.order[0] if op.micro_batch in mine)


def _refuse_unsupported(plan: StepPlan, num_ranks: int) -> None:
    found = ""
    length = {s.index: s.length for s in plan.sequences}
    if plan.limits.num_ranks != num_ranks:
        found = f"a plan for {plan.limits.num_ranks} ranks in a world of {num_ranks}"
    elif any(len(m.ranks) != 1 for m in plan.micro_batches):
        found = "a micro-batch shared by several ranks"
    elif any(s.start or s.stop != length[s.sequence] for m in plan.micro_batches for s in m.slices):
        found = "a slice that is not a whole sequence"
    elif any(layers for row in plan.recompute for layers in row):
        found = "layers to recompute"
    elif len(plan.order) > 1:
        found = f"an order for {len(plan.order)} pipeline stages"
    if found:
        raise EvenloadError(
            "trainer deepspeed cannot run this plan",
            found,
            "plan whole sequences for the ranks there are (plugins.packing alone)",
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
