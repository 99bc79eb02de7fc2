"""The Trainer's own ``training_step`` for the executor: a forward is one call of it whose backward waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.action import Action, Program, dummy
from ...core.plan.program import lower
from ...core.plan.step_plan import MicroBatch, StepPlan
from ...runtime.attention.pack import Pack, build_pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.attributes import with_attributes
from ...runtime.stage.executor import Graph, LoadedPack, StageTrainer
from ...runtime.world.agreement import rank_and_size
from ...runtime.world.plane import Plane
from ..huggingface import attention
from ..huggingface.mixers import Mixer, apart
from .pack_call import PackCalls

log = logging.getLogger("evenload")

_TENSORS = ("input_ids", "position_ids", "shift_labels")
"""What a model computes a micro-batch from."""


def _reduction(engine: Any, num_backwards: int) -> Any:
    """What DeepSpeed's engine must be told of backwards that do not follow their forwards."""
    from ..deepspeed.engine.engine import OneReduction  # imports DeepSpeed, which other Trainers need not have

    return OneReduction(engine, num_backwards)


class TrainerStage(StageTrainer):
    """The passes of one step of a Trainer.

    Args:
        trainer: the `transformers.Trainer`.
        call: its ``training_step`` with a batch as the one argument: forward, loss, then ``accelerator.backward``.
        samples: tokens and labels [2, L] of what this rank computes, by its place in the global batch.
        num_backwards: of this rank in the step; gradients are summed over ranks in the last one.
        inputs_of: the arguments of the model's call for a micro-batch.
        shares: has samples of a pack share what they begin with; None: each computes all of its tokens.
    """

    def __init__(
        self,
        trainer: Any,
        model: Any,
        call: Callable[[dict[str, Any]], Tensor],
        *,
        samples: Mapping[int, Any],
        plane: Plane | None,
        num_backwards: int,
        inputs_of: Callable[[Pack], dict[str, Any]],
        shares: PackCalls | None = None,
    ) -> None:
        super().__init__([], trainer.args.device)
        self._trainer = trainer
        self._model = model
        self._call = call
        self._samples = samples
        self._plane = plane
        self._left, self._inputs_of = num_backwards, inputs_of
        self._shares = shares
        engine = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
        self._reduction = None if engine is None else _reduction(engine.engine, num_backwards)
        self._backward_arguments: dict[str, Any] = {}
        self._inputs: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self.loss = torch.zeros((), device=self.device)
        """What the Trainer books as this rank's loss of the step."""

    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None) -> LoadedPack:
        own, plane = self._samples, self._plane
        pack = build_pack(
            micro_batch, lambda i: own[i][0], self.device, prefix, plane=plane, labels_of=lambda i: own[i][1]
        )
        if self._shares is not None:
            self._shares.share(pack, lambda i: own[i][0])
        return LoadedPack(pack)

    def forward(self, loaded: Any, received: Tensor | None, action: Action) -> Tensor:
        losses: list[Tensor] = []
        accelerator = self._trainer.accelerator

        def hold(loss: Tensor, **arguments: Any) -> None:
            losses.append(loss)
            self._backward_arguments = arguments

        self._inputs = self._inputs_of(loaded.pack)
        self._versions = {key: self._inputs[key]._version for key in _TENSORS if key in self._inputs}
        with with_attributes(accelerator, backward=hold), reducing(accelerator, self._model, self._left == 1):
            booked = self._call(dict(self._inputs))
        if action.kind != "forward_kv":
            self.loss = self.loss + booked
        if self._reduction is not None and action.kind != "forward_kv":
            self._reduction.after_forward()
        (loss,) = losses
        return loss

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._left -= 1
        if self._reduction is not None:
            self._reduction.before_backward()
        with reducing(self._trainer.accelerator, self._model, self._left == 0):
            self._trainer.accelerator.backward(graph.output, **self._backward_arguments)

    @contextmanager
    def guarded(self, model: Any) -> Iterator[None]:
        """Inside, the model's forward raises EvenloadError unless the tensors of the pack reach it as they were
        loaded."""
        # Before calls on rows become packs.
        hook = model.register_forward_pre_hook(self._refuse_other_pack, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            hook.remove()

    def _refuse_other_pack(self, model: Any, args: Any, kwargs: Any) -> None:
        for key in self._versions:
            own, taken = self._inputs[key], kwargs.get(key)
            if own._version != self._versions[key] or not (taken is own or _is_copy(taken, own)):
                raise EvenloadError(
                    "batches are changed inside Trainer.training_step, where they are packs",
                    f"{type(self._trainer).__name__} calls the model with other {key}",
                    "change batches before super().training_step, or leave evenload off for this script",
                )


def _is_copy(taken: Any, own: Tensor) -> bool:
    return isinstance(taken, Tensor) and taken.dtype == own.dtype and torch.equal(taken, own)


@contextmanager
def reducing(accelerator: Any, model: Any, reduces: bool) -> Iterator[None]:
    """Gradients are summed over ranks in this pass, or only added up on this one."""
    state, updates = accelerator.gradient_state, accelerator.gradient_state.sync_gradients
    state._set_sync_gradients(reduces and updates)
    # DeepSpeed goes by the state alone.
    waits = not reduces and accelerator.distributed_type != DistributedType.DEEPSPEED
    try:
        with accelerator.no_sync(model) if waits else nullcontext():
            yield
    finally:
        state._set_sync_gradients(updates)


@contextmanager
def attending(model: Any, mixers: Sequence[Mixer]) -> Iterator[None]:
    """Inside, the model attends inside packs and its mixers keep samples apart; afterwards as it came."""
    stock = attention.set_attention(model, attention.NAME)
    try:
        with apart(mixers):
            yield
    finally:
        attention.set_attention(model, stock)


def closed(plan: StepPlan, rank: int) -> Program:
    """The program of a rank in step with all others, ending on every rank with a forward and its own backward: DDP and
    FSDP prepare the gradient sum in the forward of the backward that does it."""
    ends = [lower(plan, 0, r, "in step")[-2:] for r in range(plan.limits.num_ranks)]
    program = lower(plan, 0, rank, "in step")
    if all(len(end) == 2 and end[0].kind == "forward" and end[0].graph == end[1].graph for end in ends):
        return program
    graph = max((action.graph for action in program), default=-1) + 1
    return (*program, dummy("forward", graph), dummy("backward", graph))


def log_step(step: int, plan: StepPlan, num_slots: int) -> None:
    """Say what a plan does. ``num_slots``: tokens of this rank's own batches, padding included."""
    own = [plan.micro_batches[index] for index in plan.of_rank(rank_and_size()[0])]
    log.info(
        "step %d: %d samples in %d micro-batches, %d of them shared by ranks, %d samples cut; %d tokens on this rank "
        "instead of %d",
        step,
        len(plan.lengths),
        len(plan.micro_batches),
        sum(len(micro_batch.ranks) > 1 for micro_batch in plan.micro_batches),
        len(plan.cut),
        sum(-(-micro_batch.num_padded_tokens // len(micro_batch.ranks)) for micro_batch in own),
        num_slots,
    )
