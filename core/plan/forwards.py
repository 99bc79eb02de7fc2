"""The program of a rank that scores a plan: its forwards alone, each whole and with the head, and nothing of them kept.

    F    receive  score  send

Every stage runs its forwards in the plan's order, so slices of a sequence ascend, ranks that share a micro-batch meet,
and links between stages are queues as they are in training. What the plan says of backwards (replays, other groups,
recomputation, offload) concerns nobody here.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Row

from .action import Action, Program, in_step
from .order import orders_of_stage
from .step_plan import Op, StepPlan, fact_of_plan

_DEPENDS_ON = ("lengths", "micro_batches", "order", "limits")


@fact_of_plan(*_DEPENDS_ON)
def lower_forwards(plan: StepPlan, stage: int, rank: int) -> Program:
    """The actions of a rank of the dp_cp plane at a pipeline stage, in order."""
    return tuple(_forwards(plan, stage, orders_of_stage(plan, stage)[rank]))


@fact_of_plan(*_DEPENDS_ON)
def forwards_in_step(plan: StepPlan) -> tuple[Program, ...]:
    """The forwards of every rank where all meet in each of them (ZeRO 3), with dummies between them."""
    return in_step([tuple(_forwards(plan, 0, ops)) for ops in orders_of_stage(plan, 0)])


def _forwards(plan: StepPlan, stage: int, ops: Row[Op]) -> Iterator[Action]:
    for op in (op for op in ops if op.kind == "F"):
        micro_batch = plan.micro_batches[op.micro_batch]
        if stage:
            yield Action("receive", op, micro_batch)
        # Layers keep nothing under no_grad, so there is nothing that one could recompute.
        yield Action("score", op, micro_batch, recomputed=None)
        if stage < plan.limits.num_stages - 1:
            yield Action("send", op, micro_batch)
