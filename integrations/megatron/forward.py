"""Forwards of a Megatron stage: the loss collected once, what may differ from pass to pass, Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ...core.plan.step_plan import Slice
from ...runtime.attributes import with_attributes
from ...runtime.experts.gate import ExpertGate
from ...runtime.measure.busy import BusyClock
from ..host.scoring import Collector
from ..host.step import Mark
from .batch import Batch, LossFunc, PlannedBatches, run_batch, run_for_logits
from .reduction import Reduction


class Forward:
    """A ``forward_step_func`` of Megatron's schedules for batches that are loaded. ``collects``: whether this rank
    takes losses down: one tensor-parallel rank of the last stage does."""

    def __init__(self, reduction: Reduction, *, collects: bool) -> None:
        self._reduction, self._collects = reduction, collects

    def __call__(self, batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
        """The stage's output and its loss function, for Megatron's schedule."""
        output, loss_func = run_batch(batch, model)

        def counted(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, num_targets, report = loss_func(losses)
            if self._collects:
                self._reduction.count(report["loss_sum"], batch.pack.num_targets)
            return loss, num_targets, report

        return output, counted


class CollectedForward:
    """A ``forward_step_func`` that hands what the last stage gives to a collector. ``collects``: whether this rank
    does: one tensor-parallel rank of the last stage."""

    def __init__(self, collector: Collector, *, collects: bool) -> None:
        self._collector, self._collects = collector, collects

    def __call__(self, batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
        """(stage output, the loss function, which collects)."""
        output, loss_func = run_for_logits(batch, model) if self._collector.wants_logits else run_batch(batch, model)

        def collected(values_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if self._collects:
                self._collector.add(values_1T.detach()[0], batch.pack)
            return loss_func(values_1T)

        return output, collected


def recomputing(config: Any, layers: int | None) -> AbstractContextManager[None]:
    """Forwards inside recompute the first ``layers`` of their stage in backward; None leaves it to the config.

    ``config``: that of the GPTModel itself. Megatron reads these fields in the forward only, and its closures keep what
    they were given.
    """
    if layers is None:
        return nullcontext()
    granularity, method, number = ("full", "block", layers) if layers else (None, None, None)
    names = {"recompute_granularity": granularity, "recompute_method": method, "recompute_num_layers": number}
    return with_attributes(config, **names)


@contextmanager
def reaching_recomputed(gpt: Any) -> Iterator[None]:
    """What the embedding gives needs a gradient, also where its weights are frozen.

    Megatron's checkpoints have a backward only where their input needs a gradient: without this, a recomputed layer
    behind a frozen embedding would leave no gradients, silently.
    """

    def need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()

    hook = gpt.embedding.register_forward_hook(need_gradient) if gpt.pre_process else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def run_stock(
    ddp: Any,
    batches: PlannedBatches,
    forward: Forward,
    reduction: Reduction,
    mark: Mark,
    clock: BusyClock,
    gate: ExpertGate | None = None,
) -> tuple[Slice, ...]:
    """Megatron's own schedule over a rank's micro-batches in launch order, for plans without an order, and the gradient
    sum; the slices that ran."""
    numbers = iter(batches.numbers)

    def forward_step(data: PlannedBatches, model: Any) -> tuple[Tensor, LossFunc]:
        batch, number = next(data), next(numbers, -1)
        mark("forward and backward")
        if gate:
            gate.enter(f"forward and backward of micro-batch {number}")
        with clock.running("F", number):
            output, loss_func = forward(batch, model)
        clock.watch_backward(output, number)
        return output, loss_func

    if not len(batches):
        reduction.finalize([ddp])  # the stock schedule always runs one micro-batch
        return ()
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
    return tuple(batches.executed)
