"""When a rank issues its sends on a device that runs all streams in one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

There kernels start in the order in which they were issued, whatever their streams. All that follows a receive waits for
it. Nothing waits for a send that has started; but a send starts only when the one before it on its link has been taken,
and until then nothing behind it starts, receives neither. So a link holds one tensor that nobody has taken, and two
neighbours that both have a second one to send wait for each other for ever, as they do in this order of two stages:

    stage 0  F0 F1 F2 F3 B0 ...    stops at the send of F3, since F2 is not taken
    stage 1  F0 B0 F1 B1 ...       stops at the send of B1, since B0 is not taken

A rank therefore holds a result back until its turn. Let every pass take one unit of time, and let `play` say when each
starts, t(stage, pass), where links hold any number of tensors. The send of pass p from stage s to stage s' is due at

    max(t(s, p) + 1, t(s', q) + 1)        q: the pass before p on that link

and issued before the first pass of its rank that starts then or later. This cannot stop: the next stage starts q at
least one unit before p, so no pass starts before what it needs is due; and a send that is due at a time needs passes
alone that started before that time. So all sends and passes can run in the order of these times, and whether programs
of blocking sends and receives between fixed pairs stop does not depend on how long anything takes. O(passes x stages).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..plan.order import DIRECTIONS, orders_of_stage
from ..plan.step_plan import Op, PassKind, StepPlan, fact_of_plan
from .events import AHEAD, play

Turns = Mapping[Op | None, tuple[PassKind, ...]]
"""Before which passes a rank issues sends that wait, each by its direction; None: behind the last one."""


@fact_of_plan("lengths", "micro_batches", "backward", "order", "limits")
def send_turns(plan: StepPlan, stage: int, rank: int) -> Turns:
    """The sends of a rank at a pipeline stage. Raises PlanError for an order that deadlocks in any queue."""
    starts, due = _starts(plan), []
    row = orders_of_stage(plan, stage)[rank]
    for kind in DIRECTIONS:
        target = stage + AHEAD[kind]
        if not 0 <= target < plan.limits.num_stages:
            continue
        taken = 0.0
        for op in row:
            if op.kind == kind:
                due.append((max(starts[stage, op] + 1, taken), kind))
                taken = starts[target, op] + 1
    due.sort(reverse=True)
    turns: dict[Op | None, tuple[PassKind, ...]] = {}
    for op in row:
        while due and due[-1][0] <= starts[stage, op]:
            turns[op] = (*turns.get(op, ()), due.pop()[1])
    return turns | {None: tuple(kind for _, kind in reversed(due))}


@fact_of_plan("lengths", "micro_batches", "backward", "order", "limits")
def _starts(plan: StepPlan) -> dict[tuple[int, Op], float]:
    """When each pass starts at each stage, where every pass takes one unit."""
    return {(event.stage, event.op): event.start_s for event in play(plan, lambda stage, op: 1.0)}
