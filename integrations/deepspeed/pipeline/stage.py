"""Carries out the instructions of `pipeline_schedule` on a `PipelineEngine`: one step of one rank at its stage.

What the engine has one of (its loss, the gradient of its output) is kept here by pass and handed to it right before the
backward that wants it. Tensors travel over `runtime.stage.stage_links`, which never wait for a send. The instructions
are the engine's for the step alone: afterwards it is the stock one.

Every token's loss is booked in the one forward of it that has a graph. Shape legend: T = slots of a pack, C = hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ....core.plan.order import orders_of_stage
from ....core.plan.step_plan import Op, Slice, StepPlan
from ....core.simulate.step import SpanKind
from ....runtime.attention.pack import IGNORE, Pack, TokensOf, build_pack
from ....runtime.attention.prefix import PrefixStore
from ....runtime.measure.busy import BusyClock
from ....runtime.stage.deferred import WgradStore, deferring
from ....runtime.stage.offload import offloading
from ....runtime.stage.stage_links import StageLinks, taken_before
from ....runtime.stage.tape import Tape
from ....runtime.world.plane import Plane
from ...host import Mark
from . import schedule as of
from .schedule import PlannedSchedule, buffer_of

WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}


_Begun = tuple[Pack, Tensor | None]


class _Graph(NamedTuple):
    """What a forward keeps for its backward."""

    pack: Pack
    received: Tensor | None
    """The stage's input [1, T, C], a leaf; None at the first stage."""
    output: Tensor
    """Of the last stage: the loss. Of others hidden states [1, T, C] whose memory is gone."""


class PlannedStage:
    """One step of one rank.

    Args:
        engine: DeepSpeed's, around a `pipeline_model.StageModule`.
        links: to the neighbouring stages.
        plane: what ranks share micro-batches over; None where the plan shares none.
        weight: of the loss of a token.
        recomputes: whether the recipe recomputes every layer; a plan that says so itself overrules it.
    """

    def __init__(
        self,
        engine: Any,
        plan: StepPlan,
        rank: int,
        *,
        links: StageLinks,
        plane: Plane | None,
        tokens_of: TokensOf,
        weight: float,
        recomputes: bool,
        clock: BusyClock,
        mark: Mark,
    ) -> None:
        self._engine, self._plan, self._rank = engine, plan, rank
        self._stage, self._last = engine.stage_id, engine.is_last_stage()
        self._links, self._plane, self._tokens_of, self._weight = links, plane, tokens_of, weight
        self._recomputes, self._clock, self._mark = recomputes, clock, mark
        self._schedule = PlannedSchedule(plan, self._stage, rank)
        neighbours = [s for s in (self._stage - 1, self._stage + 1) if 0 <= s < plan.limits.num_stages]
        self._taken = {s: taken_before(orders_of_stage(plan, s)[rank]) for s in neighbours}
        self._prefix, self._tape, self._later = PrefixStore.of_plan(plan, rank), Tape(), WgradStore()
        self._split = plan.split[self._stage] if plan.split else frozenset()
        self._backward_of = {
            stored_forward: number
            for number, stored_forward in enumerate(plan.forward_of)
            if stored_forward is not None
        }
        self._graphs: dict[int, _Graph] = {}
        self._open: dict[Op, _Begun] = {}
        """Packs of passes that have begun, and what was received for them."""
        self._given: dict[Op, Tensor] = {}
        """What passes gave and have not sent yet."""
        self.executed: list[Slice] = []
        """Slices whose backward has run; of a shared micro-batch the pieces that this rank has."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
        """Of the token losses that this rank has computed."""

    def run(self) -> None:
        """All passes, and the reduction; the engine holds the reduced gradients then, ready for its update."""
        self._links.begin()
        with self._installed(), self._splitting():
            self._engine._exec_schedule(self._schedule)
        self._mark("hand-over to other pipeline stages")
        self._links.finish()
        self._tape.check_empty()
        self._later.check_empty()
        if self._prefix:
            self._prefix.check_empty()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """The engine knows the instructions of the schedule."""
        own: dict[type, Callable[..., None]] = {
            of.Receive: self._receive,
            of.Send: self._send,
            of.Keep: self._keep,
            of.Forward: self._forward,
            of.Prefix: self._fill_prefix,
            of.Replay: self._replay,
            of.Backward: self._backward,
            of.Weights: self._weights,
        }
        self._engine._INSTRUCTION_MAP = {
            **type(self._engine)._INSTRUCTION_MAP,
            **{kind: _method(verb) for kind, verb in own.items()},
            ReduceGrads: lambda _: self._reduce(),
        }
        try:
            yield
        finally:
            del self._engine._INSTRUCTION_MAP

    @contextmanager
    def _splitting(self) -> Iterator[None]:
        """Linear layers of the decoder can leave their weight gradients, where the plan wants that at this stage."""
        with ExitStack() as stack:
            if self._split:
                modules = (module for block in self._engine.module.blocks for module in block.modules())
                stack.enter_context(deferring([m for m in modules if isinstance(m, nn.Linear)], self._later))
            yield

    def _receive(self, op: Op) -> None:
        self._tell(op)
        if op.kind == "B":
            pack = self._graphs[buffer_of(self._plan, op)].pack
            self._open[op] = pack, self._links.receive(op, self._room(pack), self._taken[self._stage + 1][op])
        else:
            pack = self._load(op)
            self._open[op] = pack, self._links.receive(op, self._room(pack), self._taken[self._stage - 1][op])

    def _send(self, op: Op) -> None:
        tensor = self._given.pop(op)
        self._links.send(op, tensor)
        if op.kind == "F":
            _hollow_out(tensor)  # what is under way is held by the links

    def _keep(self, op: Op) -> None:
        pack, received_1TC = self._open.pop(op)
        assert received_1TC is not None
        self._tape.write(pack.slices, pack.segments, received_1TC[0])

    def _forward(self, op: Op) -> None:
        pack, received_1TC = self._open.pop(op) if op in self._open else self._begin(op)
        away = self._plan.offload[op.micro_batch] if self._plan.offload else 0.0
        with offloading(away, self._engine.module.blocks, self._engine.device):
            layers = self._layers(op, self._plan.limits.layers_per_stage if self._recomputes else 0)
            self._run(op, "F", pack, received_1TC, layers)

    def _replay(self, op: Op) -> None:
        self._tell(op)
        pack, received_1TC = self._load(op), None
        if self._stage:
            received_1TC = self._room(pack)
            self._tape.gather(pack.slices, pack.segments, received_1TC[0])
        # A replay is the recomputation: what the recipe recomputes need not run a third time.
        self._run(op, "R", pack, received_1TC, self._layers(op, 0))
        if not self._last:
            _hollow_out(self._given.pop(op))

    def _fill_prefix(self, op: Op) -> None:
        pack, received_1TC = self._open[op] if op in self._open else self._begin(op)
        self._meet(op)
        with self._clock.running("F", op.micro_batch), torch.no_grad():
            output = DeepSpeedEngine.forward(self._engine, received_1TC, pack, head=False)
        if not self._last:
            self._given[op] = output

    def _run(self, op: Op, kind: SpanKind, pack: Pack, received_1TC: Tensor | None, layers: int) -> None:
        """A forward that keeps its graph."""
        if received_1TC is not None:
            received_1TC.requires_grad_()
        self._meet(op)
        backward = self._backward_of[op.micro_batch] if kind == "F" else op.micro_batch
        with self._clock.running(kind, op.micro_batch), self._leaving(backward):
            output = DeepSpeedEngine.forward(self._engine, received_1TC, pack, recomputed=layers)
            if self._last:
                loss = _loss_sum(output[0], pack)
                output = loss * self._weight
        if self._last:
            self.loss_sum += loss.detach().double()
        else:
            self._given[op] = output
        self._graphs[buffer_of(self._plan, op)] = _Graph(pack, received_1TC, output)

    def _backward(self, op: Op) -> None:
        engine, buffer = self._engine, buffer_of(self._plan, op)
        pack, received_1TC, output = self._graphs.pop(buffer)
        if self._last:
            self._tell(op)
            engine.loss = output
        else:
            _, engine.grad_layer = self._open.pop(op)
            engine.pipe_buffers["outputs"][buffer] = output
        del output
        self._meet(op)
        with self._clock.running("B", op.micro_batch), self._leaving(op.micro_batch):
            engine._exec_backward_pass(buffer)
        engine.loss = engine.grad_layer = None
        if received_1TC is not None:
            assert received_1TC.grad is not None
            self._given[op] = received_1TC.grad
        self.executed += pack.slices

    def _weights(self, op: Op) -> None:
        self._tell(op)
        # As in the engine's own backwards: DeepSpeed's hooks then take this for part of one, not for the end of one.
        self._engine._running_engine_backward = True
        with self._clock.running("W", op.micro_batch):
            self._later.run(op.micro_batch)
        self._engine._running_engine_backward = False

    def _reduce(self) -> None:
        """One sum over the ranks of the stage; one that had no work takes part with zeros."""
        self._mark("gradient reduction")
        with self._clock.noting("G"):
            for parameter in self._engine.module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._engine._exec_reduce_grads()

    def _begin(self, op: Op) -> _Begun:
        """The pack of a forward for which nothing is received."""
        self._tell(op)
        return self._load(op), None

    def _layers(self, op: Op, instead: int) -> int:
        """How many layers the plan recomputes in a pass; ``instead`` where it does not say."""
        return self._plan.recompute[self._stage][op.micro_batch] if self._plan.recompute else instead

    def _leaving(self, backward: int) -> AbstractContextManager[None]:
        """Around the passes of a backward: it leaves its weight gradients to a W, where the plan has one here."""
        return self._later.splitting(backward) if backward in self._split else nullcontext()

    def _load(self, op: Op) -> Pack:
        micro_batch = self._plan.passes(op.kind)[op.micro_batch]
        return build_pack(micro_batch, self._tokens_of, self._engine.device, self._prefix, plane=self._plane)

    def _room(self, pack: Pack) -> Tensor:
        """Space for a stage's input or the gradient of its output: [1, T, C]."""
        config, dtype = self._engine.module.config, next(self._engine.module.parameters()).dtype
        return torch.empty(1, pack.num_padded_tokens, config.hidden_size, dtype=dtype, device=self._engine.device)

    def _meet(self, op: Op) -> None:
        """Before a shared pass: be sure that its ranks are about to run the same one. Raises RankError."""
        micro_batch = self._plan.passes(op.kind)[op.micro_batch]
        if len(micro_batch.ranks) > 1:
            assert self._plane is not None
            assert op.kind != "W"
            self._plane.meet(op.micro_batch, self._plan.digest, micro_batch.ranks, op.kind)

    def _tell(self, op: Op) -> None:
        self._mark(f"{WORDS[op.kind]} of micro-batch {op.micro_batch}")


def _hollow_out(output: Tensor) -> None:
    """Free a stage output whose backward asks for its shape alone; without a graph it has none and stays."""
    if output.requires_grad:
        assert not output._is_view(), "its base would keep the memory"
        output.data = output.new_empty(()).expand(output.shape)


def _method(verb: Callable[[Op], None]) -> Callable[[Any, Op], None]:
    """A verb as the engine calls it: with itself first."""
    return lambda _, op: verb(op)


def _loss_sum(logits_TV: Tensor, pack: Pack) -> Tensor:
    """Sum of the token losses of a pack, in float32 at least; 0 with zero gradients for a dummy."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return cross_entropy(logits_TV.to(wide), pack.labels_T, ignore_index=IGNORE, reduction="sum")
