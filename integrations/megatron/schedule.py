"""Runs the order of a plan: this rank's passes at its pipeline stage, by Megatron's own forward and backward step.

    F, kept      forward with grad; its graph waits for the backward that uses it
    F, replayed  forward without grad: it fills the prefix KV and goes on to the next stage, no logits, no loss; a stage
                 behind the first keeps what it received on a tape
    B, kept      Megatron's backward step
    B, replayed  the input is gathered from the tape as a leaf, the forward runs again with grad, then backward step;
                 this is its recomputation, whatever the recipe recomputes elsewhere
    W            the weight gradients of the decoder's linear layers that a backward left to it (`linears`)

Every token's loss is booked in the one forward of it that has a graph. Every stage output has a backward, also without
a label: the gradients of its keys and values are wanted. The laws of a plan (`core.laws`) rule out deadlocks and lost
prefixes. Plans without an order run in Megatron's own schedule (see `stock`), unless ranks share micro-batches or
activations are offloaded: then it is Megatron's order that runs here, over links that never wait for a send, which is
what the laws have checked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.utils import get_model_config, get_model_type
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import MicroBatch, Op, PassKind, Slice, StepPlan
from ...runtime.attention.pack import Pack, TokensOf, build_pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.deferred import WgradStore
from ...runtime.stage.offload import layers_of, offloading
from ...runtime.stage.stage_links import StageLinks, taken_before
from ...runtime.stage.tape import Tape
from ...runtime.world.plane import Plane
from ..host import Mark
from .batch import Batch
from .forward import Forward, headless, reaching_recomputed, recomputing
from .model.attention import seq_params
from .model.linears import deferring_wgrads
from .plane import meet

WORDS: dict[PassKind, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}


class _Graph(NamedTuple):
    """What a forward keeps for its backward."""

    received: Tensor | None
    """The stage's input, a leaf; None at the first stage."""
    output: Tensor
    pack: Pack


class PlannedStage:
    """The passes of one rank in one step.

    Args:
        links: to the neighbouring stages; None where there is one stage.
        plane: what ranks share micro-batches over; None where the plan shares none.
        model: Megatron's DistributedDataParallel around the stage's ``gpt``.
    """

    def __init__(
        self,
        plan: StepPlan,
        stage: int,
        dp_cp_rank: int,
        *,
        model: Any,
        gpt: Any,
        links: StageLinks | None,
        plane: Plane | None,
        forward: Forward,
        clock: BusyClock,
        tokens_of: TokensOf,
        device: torch.device,
        mark: Mark,
    ) -> None:
        self._plan, self._stage = plan, stage
        self._first, self._last = stage == 0, stage == plan.limits.num_stages - 1
        self._ops = orders_of_stage(plan, stage)[dp_cp_rank]
        neighbours = [s for s in (stage - 1, stage + 1) if 0 <= s < plan.limits.num_stages]
        self._taken = {s: taken_before(orders_of_stage(plan, s)[dp_cp_rank]) for s in neighbours}
        self._model, self._gpt, self._links, self._plane = model, gpt, links, plane
        self._forward, self._clock = forward, clock
        self._config, self._blocks = get_model_config(model), layers_of(gpt)
        self._tokens_of, self._device, self._mark = tokens_of, device, mark
        self._prefix, self._tape = PrefixStore.of_plan(plan, dp_cp_rank), Tape()
        self._graphs: dict[int, _Graph] = {}
        self._split = plan.split[stage] if plan.split else frozenset()
        self._later = WgradStore()
        self._backward_of = {
            stored_forward: number
            for number, stored_forward in enumerate(plan.forward_of)
            if stored_forward is not None
        }
        self.executed: list[Slice] = []
        """Slices whose backward has run; of a shared micro-batch the pieces that this rank has."""

    def run(self) -> None:
        """All passes of the step; the gradients are summed over this rank's micro-batches then."""
        passes = {"F": self._run_forward, "B": self._run_backward, "W": self._run_weights}
        rows = self._plan.recompute
        recomputed = self._gpt.config.recompute_granularity or any(rows[self._stage] if rows else ())
        with (
            deferring_wgrads(self._gpt, self._later) if self._split else nullcontext(),
            reaching_recomputed(self._gpt) if recomputed else nullcontext(),
        ):
            if self._links:
                self._links.begin()
            for op in self._ops:
                self._mark(f"{WORDS[op.kind]} of micro-batch {op.micro_batch}")
                passes[op.kind](op)
        self._later.check_empty()
        if self._links:
            self._mark("hand-over to other pipeline stages")
            self._links.finish()
        self._tape.check_empty()
        if self._prefix:
            self._prefix.check_empty()

    def _run_forward(self, op: Op) -> None:
        micro_batch = self._plan.micro_batches[op.micro_batch]
        batch = self._load(micro_batch)
        received = None if self._first else self._receive(op, batch.pack.num_padded_tokens)
        if op.micro_batch in self._plan.kept:
            output = self._compute(batch, received, op, self._layers(op, instead=None))
            self._graphs[op.micro_batch] = _Graph(received, output, batch.pack)
            if not self._last:
                self._send(op, output)
                deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
            return
        if received is not None:
            self._tape.write(batch.pack.slices, batch.pack.segments, received)
        if self._last and self._plan.cut.isdisjoint(s.sequence for s in micro_batch.slices):
            return  # nobody reads its keys, and nobody waits for its output
        with torch.no_grad(), headless(self._gpt):
            output = self._compute(batch, received, op, 0, with_loss=False)
        if not self._last:
            self._send(op, output)

    def _run_backward(self, op: Op) -> None:
        stored_forward = self._plan.forward_of[op.micro_batch]
        received, output, pack = self._replay(op) if stored_forward is None else self._graphs.pop(stored_forward)
        gradient = None if self._last else self._receive(op, pack.num_padded_tokens)
        meet(self._plane, self._plan, op)
        with self._splitting(op.micro_batch):
            handed_down = backward_step(received, output, gradient, get_model_type(self._model), self._config)
        if not self._first:
            self._send(op, handed_down)
        self.executed += pack.slices

    def _run_weights(self, op: Op) -> None:
        with self._clock.running("W", op.micro_batch):
            self._later.run(op.micro_batch)

    def _splitting(self, backward: int) -> AbstractContextManager[None]:
        """Around a forward and its backward, by the latter's number: whether it leaves weight gradients to a W."""
        return self._later.splitting(backward) if backward in self._split else nullcontext()

    def _replay(self, op: Op) -> _Graph:
        """What a forward would have kept for a backward micro-batch that kept nothing."""
        micro_batch = self._plan.passes("B")[op.micro_batch]
        batch, received = self._load(micro_batch), None
        if not self._first:
            received = self._room(batch.pack.num_padded_tokens)
            self._tape.gather(batch.pack.slices, batch.pack.segments, received)
        # A replay is the recomputation: what the recipe recomputes need not run a third time.
        output = self._compute(batch, received, op, self._layers(op, instead=0))
        if not self._last:
            deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return _Graph(received, output, batch.pack)

    def _compute(
        self, batch: Batch, received: Tensor | None, op: Op, layers: int | None, with_loss: bool = True
    ) -> Tensor:
        """Megatron's forward step, a replay if ``op`` is B; with grad enabled, what was received becomes a leaf."""
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        meet(self._plane, self._plan, op)
        number = op.micro_batch
        backward = self._backward_of.get(number, -1) if op.kind == "F" else number
        forward = partial(self._forward, kind="F" if op.kind == "F" else "R", number=number, backward=backward)
        with (
            recomputing(self._gpt.config, layers),
            offloading(self._away(op), self._blocks, self._device),
            self._splitting(backward),
        ):
            output, _ = forward_step(
                forward,
                batch,
                self._model,
                1,
                received,
                [],
                self._config,
                1,
                is_last_stage=self._last and with_loss,
            )
        result: Tensor = output
        return result

    def _layers(self, op: Op, instead: int | None) -> int | None:
        """How many layers the plan recomputes in a pass; ``instead`` where it does not say."""
        return self._plan.recompute[self._stage][op.micro_batch] if self._plan.recompute else instead

    def _away(self, op: Op) -> float:
        """The share of a pass's activations that waits for the backward in host memory; a replay's is next."""
        keeps = op.kind == "F" and torch.is_grad_enabled() and bool(self._plan.offload)
        return self._plan.offload[op.micro_batch] if keeps else 0.0

    def _load(self, micro_batch: MicroBatch) -> Batch:
        pack = build_pack(micro_batch, self._tokens_of, self._device, self._prefix, plane=self._plane)
        return Batch(pack, seq_params(pack))

    def _receive(self, op: Op, slots: int) -> Tensor:
        assert self._links is not None
        neighbour = self._stage - 1 if op.kind == "F" else self._stage + 1
        return self._links.receive(op, self._room(slots), self._taken[neighbour][op])

    def _send(self, op: Op, tensor: Tensor) -> None:
        assert self._links is not None
        self._links.send(op, tensor)

    def _room(self, slots: int) -> Tensor:
        """Space for a stage's input or its gradient: [T, 1, hidden]."""
        config = self._config
        return torch.empty(slots, 1, config.hidden_size, dtype=config.pipeline_dtype, device=self._device)


def refuse_plan(plan: StepPlan, layout: Layout) -> None:
    """Raise EvenloadError for a plan of another layout, or one whose micro-batches are shared as nothing here does."""
    stages = len(plan.order or plan.recompute) or (plan.limits.num_stages if plan.shared else layout.pp)
    grouped = (*plan.micro_batches, *plan.backward)
    static = next((i for i, m in enumerate(grouped) if len(m.ranks) > 1 and not m.cp_comm), None)
    rules = [
        (
            plan.limits.num_ranks != layout.dp_cp_size,
            "the plan was made for another number of data-parallel ranks",
            f"a plan for {plan.limits.num_ranks} ranks, {layout.dp_cp_size} in the job",
            "plan for the layout of this job",
        ),
        (
            stages != layout.pp,
            "the plan was made for another number of pipeline stages",
            f"a plan for {stages} stages, {layout.pp} in the job",
            "plan for the layout of this job",
        ),
        (
            static is not None,
            "a shared micro-batch has no engine: static context parallelism can be planned, not run",
            f"micro-batch {static}",
            "let plugins.mesh share sequences: it says how",
        ),
    ]
    for broken, what, found, do in rules:
        if broken:
            raise EvenloadError(what, found, do)
