"""Megatron's own schedule over a rank's micro-batches in launch order: for plans without an order."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ...core.plan.step_plan import Slice
from ...runtime.measure.busy import BusyClock
from ..host import Mark
from .batch import LossFunc, PlannedBatches
from .forward import Forward
from .reduction import Reduction


def run_stock(
    ddp: Any, batches: PlannedBatches, forward: Forward, reduction: Reduction, mark: Mark, clock: BusyClock
) -> list[Slice]:
    """All forwards and backwards of this rank and the gradient sum; the slices that ran."""
    numbers = iter(batches.numbers)

    def forward_step(data: PlannedBatches, model: Any) -> tuple[Tensor, LossFunc]:
        batch, number = next(data), next(numbers, -1)
        mark("forward and backward")
        with clock.running("F", number):
            output, loss_func = forward(batch, model)
        clock.watch_backward(output, number)
        return output, loss_func

    if not len(batches):
        reduction.finalize([ddp])  # the stock schedule always runs one micro-batch
        return []
    with reduction.computing():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[ddp],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
    return batches.executed
