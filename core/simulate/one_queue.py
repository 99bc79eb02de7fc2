"""When a rank issues its sends on a device that runs all streams in one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

There kernels start in the order in which they were issued, whatever their streams. All that follows a receive waits for
it. Nothing waits for a send that has started; but a send starts only when the one before it on its link has been taken,
and until then nothing after it starts, receives neither. So a link holds one tensor that nobody has taken, and two
neighbours that both have a second one to send wait for each other for ever, as they do in this order of two stages:

    stage 0  F0 F1 F2 F3 B0 ...    stops at the send of F3, since F2 is not taken
    stage 1  F0 B0 F1 B1 ...       stops at the send of B1, since B0 is not taken

A rank therefore holds a result back until its turn. Let every pass take one unit of time, and let `play` say when each
starts, t(stage, pass), where links hold any number of tensors. The send of pass p from stage s to stage s' is due at

    max(t(s, p) + 1, t(s', q) + 1)        q: the pass before p on that link

and issued before the first pass of its rank that starts then or later, whichever stage of a device of two it is at.
This cannot stop: the next stage starts q at least one unit before p, so no pass starts before what it needs is due; and
a send that is due at a time needs passes alone that started before that time. So all sends and passes can run in the
order of these times, and whether programs of blocking sends and receives between fixed pairs stop does not depend on
how long anything takes. O(passes x stages).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..plan.order import DIRECTIONS, StagedOp, orders_of_device, orders_of_stage
from ..plan.step_plan import Op, PassKind, StepPlan, fact_of_plan
from .events import AHEAD, play

Turns = Mapping[StagedOp | None, tuple[tuple[int, PassKind], ...]]
"""Before which passes a rank issues sends that wait, each by the stage that sends and its direction; None: after the
last one."""


@fact_of_plan("lengths", "micro_batches", "backward", "order", "merge", "limits")
def send_turns(plan: StepPlan, device: int, rank: int) -> Turns:
    """The sends of a rank at a device of its pipeline, none of them to itself. Raises PlanError for an order that
    deadlocks in any queue."""
    starts, limits = _starts(plan), plan.limits
    due: list[tuple[float, PassKind, int]] = []
    for stage in limits.stages_of_device(device):
        for kind in DIRECTIONS:
            target = stage + AHEAD[kind]
            if not 0 <= target < limits.num_stages or limits.device_of_stage(target) == device:
                continue
            taken = 0.0
            for op in orders_of_stage(plan, stage)[rank]:
                if op.kind == kind:
                    due.append((max(starts[stage, op] + 1, taken), kind, stage))
                    taken = starts[target, op] + 1
    due.sort(reverse=True)
    turns: dict[StagedOp | None, tuple[tuple[int, PassKind], ...]] = {}
    for staged in orders_of_device(plan, device)[rank]:
        while due and due[-1][0] <= starts[staged]:
            _, kind, stage = due.pop()
            turns[staged] = (*turns.get(staged, ()), (stage, kind))
    return turns | {None: tuple((stage, kind) for _, kind, stage in reversed(due))}


@fact_of_plan("lengths", "micro_batches", "backward", "order", "merge", "limits")
def _starts(plan: StepPlan) -> dict[tuple[int, Op], float]:
    """When each pass starts at each stage, where every pass takes one unit."""
    return {(event.stage, event.op): event.start_s for event in play(plan, lambda stage, op: 1.0)}
