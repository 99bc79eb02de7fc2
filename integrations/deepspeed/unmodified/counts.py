"""Equally many micro-batches on every rank, for loops whose ``gradient_accumulation_steps`` are fixed."""

from __future__ import annotations

from ....core.errors import EvenloadError
from ....core.plan.action import DUMMY
from ....core.plan.step_plan import MicroBatch, StepPlan


def into_exactly(plan: StepPlan, count: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """`count` micro-batches for every rank, dummies where the plan has fewer: ``result[rank][k]``.

    For trainers whose number of micro-batches a step is fixed (``gradient_accumulation_steps``). Raises EvenloadError:
    a rank has more, or shares one with others, or layers are to be recomputed.
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
    own = [[plan.micro_batches[i] for i in plan.of_rank(rank)] for rank in range(plan.limits.num_ranks)]
    most = max(map(len, own))
    if most > count:
        raise EvenloadError(
            "the batch does not fit into the micro-batches of a step",
            f"{plan.num_tokens} tokens on {plan.limits.num_ranks} ranks need {most} micro-batches of "
            f"{plan.limits.max_tokens} tokens, gradient_accumulation_steps is {count}",
            f"raise gradient_accumulation_steps to {most}, or packing.max_tokens",
        )
    return tuple(tuple(m) + (DUMMY,) * (count - len(m)) for m in own)
