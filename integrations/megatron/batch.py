"""Micro-batches of a plan in the form that Megatron's schedules want, and its own schedule over them.

    batches = PlannedBatches.of_rank(plan, plane_rank, tokens_of, device)
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches, num_microbatches=len(batches), model=[ddp], ...
    )

with ``config.calculate_per_token_loss=True``: `token_loss` returns the *sum* of the token losses and their number, and
Megatron divides the summed gradients by the global number once. That is exact for any numbers of micro-batches and
tokens per rank; an average of averages is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from ...runtime.attention.labels import Labels, readers_of
from ...runtime.attention.pack import IGNORE, Pack, TokensOf, build_pack
from ...runtime.experts.gate import ExpertGate
from ...runtime.experts.routing import StepRouting
from ...runtime.measure.busy import BusyClock
from ...runtime.world.plane import Plane
from ..host.step import Mark, refuse_own_order
from .model.attention import PlannedSeqParams, seq_params
from .reduction import Reduction

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[["Batch", Any], tuple[Tensor, LossFunc]]
"""A ``forward_step_func`` of batches that are loaded: the stage's output, or what the loss function takes."""


class Batch(NamedTuple):
    """A micro-batch whose tensors lie on the device, with what Megatron's attention takes."""

    pack: Pack
    params: PlannedSeqParams


class PlannedBatches(Iterator[Batch]):
    """A data iterator over some micro-batches, each loaded when it is asked for; ``len()`` gives how many there are."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        tokens_of: TokensOf,
        device: torch.device | str = "cpu",
        plane: Plane | None = None,
        routing: StepRouting | None = None,
        labels: Labels | None = None,
    ) -> None:
        self._number, self._coming = len(micro_batches), iter(micro_batches)
        self._tokens_of = tokens_of
        self._readers = readers_of(labels)
        self._device = device
        self._plane = plane
        self._routing = routing
        self.pack_multiple = 1
        """What the slots of a pack are divisible by: tp under sequence parallelism."""
        self.trunks = False
        """Slices that begin late continue others of their micro-batch."""
        self.numbers: tuple[int, ...] = ()
        """Which micro-batches of a plan these are, where they come from one."""
        self.executed: list[Slice] = []
        """Slices handed out so far."""

    @classmethod
    def of_rank(
        cls,
        plan: StepPlan,
        dp_cp_rank: int,
        tokens_of: TokensOf,
        device: torch.device | str = "cpu",
        plane: Plane | None = None,
        routing: StepRouting | None = None,
        labels: Labels | None = None,
    ) -> PlannedBatches:
        """The micro-batches of a plane rank in launch order; EvenloadError for what stock schedules cannot run. Ranks
        share micro-batches over ``plane`` (see `open_plane`), without pipeline stages only."""
        refuse_own_order(plan, dp_cp_rank, shares=plane is not None and plan.limits.num_stages == 1)
        micro_batches = [plan.micro_batches[index] for index in plan.of_rank(dp_cp_rank)]
        batches = cls(
            micro_batches, tokens_of, device, plane, routing or StepRouting(plan.lengths, labels=labels), labels
        )
        batches.numbers = plan.of_rank(dp_cp_rank)
        batches.trunks = len(plan.trunks) > 0
        return batches

    def __len__(self) -> int:
        return self._number

    def __next__(self) -> Batch:
        micro_batch, plane = next(self._coming), self._plane
        pack = build_pack(
            micro_batch,
            self._tokens_of,
            self._device,
            plane=plane,
            pack_multiple=self.pack_multiple,
            trunks=self.trunks,
            **self._readers,
        )
        self.executed += pack.slices
        return Batch(pack, seq_params(pack, routing=self._routing))


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, LossFunc]:
    """The ``forward_step_func`` of Megatron's schedules."""
    return run_batch(next(batches), model)


def run_batch(batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
    """Forward of one micro-batch: (stage output, or token losses [1, T] on the last stage; the loss function)."""
    pack = batch.pack
    tokens, positions, labels = pack.tokens_T[None], pack.positions_T[None], pack.labels_T.clamp(min=0)[None]
    output: Tensor = model(tokens, positions, None, labels=labels, packed_seq_params=batch.params)
    return output, partial(token_loss, pack)


def run_for_logits(batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
    """Forward of one micro-batch, with logits [1, T, V] of the whole vocabulary on the last stage."""
    tokens, positions = batch.pack.tokens_T[None], batch.pack.positions_T[None]
    output: Tensor = model(tokens, positions, None, packed_seq_params=batch.params, runtime_gather_output=True)
    return output, lambda logits_1TV: (logits_1TV.new_zeros(()), logits_1TV.new_zeros((), dtype=torch.int32), {})


def collecting(run: ForwardStep, collect: Callable[[Pack, Tensor, dict[str, Tensor]], None]) -> ForwardStep:
    """``run``, after whose losses ``collect`` gets the pack, what the last stage gave of it, and the report."""

    def forward(batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
        output, loss_func = run(batch, model)

        def collected(values_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            answer = loss_func(values_1T)
            collect(batch.pack, values_1T.detach(), answer[-1])
            return answer

        return output, collected

    return forward


def token_loss(pack: Pack, losses_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of the token losses, each times its weight; their number as int32; what to report).

    Where tokens have weights, gradients are to be divided by `labels.loss_divisor`, and not by their number. A pack
    without targets multiplies by zero rather than leaving the graph: its backward runs, as a dummy's must.
    """
    weights_T = pack.labels_T != IGNORE if pack.weights_T is None else pack.weights_T
    loss = (losses_1T.view(-1) * weights_T).sum(dtype=torch.float64)
    num_targets = loss.new_full((), pack.num_targets, dtype=torch.int32)
    return loss, num_targets, {"loss_sum": loss.detach(), "num_targets": num_targets}


def run_stock(
    ddp: Any,
    batches: PlannedBatches,
    forward: ForwardStep,
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
