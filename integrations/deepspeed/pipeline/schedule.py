"""The order of a plan as a `PipeSchedule`: instructions that DeepSpeed's `PipelineEngine` executes one by one.

DeepSpeed's own instructions hand tensors on by sends that block and keep one loss and one output gradient for the whole
engine, which allows 1F1B and nothing else. These name the pass that they belong to; `pipeline_stage` carries them out.

    F, kept      Receive  Forward                 Send
    F, replayed  Receive  Prefix  Keep            Send      no Prefix where nobody reads its keys or its output
    B, kept                       Receive Backward Send
    B, replayed           Replay  Receive Backward Send
    W            Weights

The first stage receives no input and sends no gradient, the last one the other way round. Gradients are reduced last,
by DeepSpeed's own instructions.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule, ReduceGrads, ReduceTiedGrads

from ....core.plan.order import orders_of_stage
from ....core.plan.step_plan import Op, StepPlan


class OfPass(PipeInstruction):  # type: ignore[misc]
    """Part of a pass of the plan."""

    op: Op

    def __init__(self, op: Op) -> None:
        super().__init__(op=op)


class Receive(OfPass):
    """The stage's input (F), or the gradient of its output (B), from the neighbour."""


class Send(OfPass):
    """What the pass gave, to the neighbour."""


class Keep(OfPass):
    """The input that was received waits for a replay."""


class Forward(OfPass):
    """A forward whose activations wait for their backward."""


class Prefix(OfPass):
    """A forward without activations: keys and values of cut sequences, and the next stage's input."""


class Replay(OfPass):
    """The forward of a backward that kept nothing."""


class Backward(OfPass):
    """A backward; it leaves the weight gradients to a W of the same number, if there is one."""


class Weights(OfPass):
    """The weight gradients that a backward has left."""


class PlannedSchedule(PipeSchedule):  # type: ignore[misc]
    """All passes of one plane rank at one stage, and the reduction of its gradients."""

    def __init__(self, plan: StepPlan, stage: int, rank: int) -> None:
        super().__init__(len(plan.of_rank(rank)), plan.limits.num_stages, stage)
        self._plan, self._rank = plan, rank

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One list for each pass, then one for the reduction."""
        for op in orders_of_stage(self._plan, self.stage_id)[self._rank]:
            yield list(self._instructions(op))
        yield [ReduceTiedGrads(), ReduceGrads()]

    def num_pipe_buffers(self) -> int:
        """See `buffer_of`."""
        return len(self._plan.micro_batches) + len(self._plan.passes("B"))

    def _instructions(self, op: Op) -> Iterator[PipeInstruction]:
        if op.kind == "W":
            yield Weights(op)
        elif op.kind == "F":
            yield from self._forward(op)
        else:
            if self._plan.forward_of[op.micro_batch] is None:
                yield Replay(op)
            if not self.is_last_stage:
                yield Receive(op)
            yield Backward(op)
            if not self.is_first_stage:
                yield Send(op)

    def _forward(self, op: Op) -> Iterator[PipeInstruction]:
        plan, kept = self._plan, op.micro_batch in self._plan.kept
        is_read = any(s.sequence in plan.cut for s in plan.micro_batches[op.micro_batch].slices)
        if not self.is_first_stage:
            yield Receive(op)
        if kept:
            yield Forward(op)
        elif is_read or not self.is_last_stage:
            yield Prefix(op)
        if not (kept or self.is_first_stage):
            yield Keep(op)
        if not self.is_last_stage:
            yield Send(op)


def buffer_of(plan: StepPlan, op: Op) -> int:
    """The engine's buffer of a pass: the forward's of its graph, or one for each replay behind those."""
    if op.kind == "F":
        return op.micro_batch
    stored_forward = plan.forward_of[op.micro_batch]
    return len(plan.micro_batches) + op.micro_batch if stored_forward is None else stored_forward
