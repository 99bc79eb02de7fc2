"""Carries out the program of a rank (`core.plan.program`): one step at one pipeline stage, for any trainer.

What a trainer does its own way is a `StageTrainer`'s: how a pack is loaded, run forward and run backward. All else is
here: what is received and sent, the inputs on the tape, the keys and values of cut sequences, weight gradients that
wait, what goes to the host, and that ranks which share a micro-batch are at the same pass. Every token's loss is booked
in the one forward of it that has a graph. Every stage output has a backward, also without a label: the gradients of its
keys and values are wanted.

Shape legend: T = slots of a pack, C = hidden size. Stage inputs are [1, T, C] or [T, 1, C], as the trainer wants them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...core.plan.action import Action, ActionKind
from ...core.plan.in_step import Program
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from ...core.simulate.one_queue import send_turns
from ...core.simulate.step import SpanKind
from ..attention.pack import Pack
from ..attention.prefix import PrefixStore
from ..measure.busy import BusyClock
from ..world.plane import Plane
from .deferred import WgradStore
from .offload import offloading
from .stage_links import StageLinks, taken_before
from .tape import Tape

WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
SPAN_KINDS: dict[ActionKind, SpanKind] = {
    "forward": "F",
    "forward_kv": "F",
    "recompute_forward": "R",
    "backward": "B",
    "weight_grads": "W",
    "score": "F",
}
"""How the busy clock counts what computes."""
_SENT_AHEAD = 1
"""Outputs of scores that wait for the next stage: in training its gradients tell what it has taken."""


class Loaded(Protocol):
    """A micro-batch in the trainer's form."""

    @property
    def pack(self) -> Pack: ...


class LoadedPack(NamedTuple):
    """A micro-batch whose tensors lie on the device."""

    pack: Pack


class Graph(NamedTuple):
    """What a forward keeps for its backward."""

    loaded: Any
    received: Tensor | None
    """The stage's input, a leaf; None at the first stage."""
    output: Tensor
    """Hidden states, whose memory is gone behind a `free_output`; at the last stage the loss."""


class StageTrainer(ABC):
    """How a trainer runs the packs of its stage, whose decoder layers are ``blocks`` on ``device``."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.blocks = blocks
        self.device = device
        self.tape = Tape()

    def prepared(self, program: Program, wgrads: WgradStore) -> AbstractContextManager[None]:
        """Holds around all actions of a program; ``wgrads`` takes the weight gradients that backwards leave."""
        return nullcontext()

    def entering(self, where: str) -> None:
        """Before each pass that runs through the layers; ``where`` is what the watchdog says of it."""
        return

    @abstractmethod
    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None) -> Loaded:
        """What this rank has of a micro-batch."""

    @abstractmethod
    def forward(self, loaded: Any, received: Tensor | None, action: Action) -> Tensor:
        """The stage's output, at the last stage the loss; a forward_kv runs under no_grad and without the head, a score
        under no_grad with it."""

    @abstractmethod
    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        """The gradient of what was received. ``gradient``: of the output; None at the last stage."""

    def empty_like_input(self, pack: Pack) -> Tensor:
        """Space for the stage's input or the gradient of its output."""
        raise AssertionError("a trainer without pipeline stages hands nothing on")

    def free_output(self, output: Tensor) -> None:
        """Give the memory of an output back that was handed on, and whose backward asks for its shape alone."""
        assert not output._is_view(), "its base would keep the memory"
        output.data = output.new_empty(()).expand(output.shape)

    def weight_grads(self) -> AbstractContextManager[None]:
        """A context in which the executor runs a weight_grads."""
        return nullcontext()


class Executor:
    """One step of one rank at its stage.

    Args:
        program: `lower`'s answer for this rank, or that of `lower_forwards`.
        links: to the neighbouring stages; None where there is one stage.
        plane: what ranks share micro-batches over; None where the plan shares none.
    """

    def __init__(
        self,
        plan: StepPlan,
        stage: int,
        rank: int,
        program: Program,
        trainer: StageTrainer,
        *,
        links: StageLinks | None,
        plane: Plane | None,
        clock: BusyClock,
        mark: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._program = program
        self._trainer = trainer
        self._links = links
        self._plane = plane
        self._clock = clock
        self._mark = mark
        neighbours = [s for s in (stage - 1, stage + 1) if 0 <= s < plan.limits.num_stages]
        self._scores = any(action.kind == "score" for action in program)
        """No backward follows, so neighbours send nothing back."""
        self._taken = {s: taken_before(orders_of_stage(plan, s)[rank]) for s in neighbours}
        waits = links is not None and links.one_queue and not self._scores
        self._turns = send_turns(plan, stage, rank) if waits else None
        self._prefix, self.wgrads = PrefixStore.of_plan(plan, rank), WgradStore()
        self._graphs: dict[int, Graph] = {}
        self._loaded: Loaded | None = None
        """Of the pass that has begun, with what was received for it and what it gave."""
        self._received: Tensor | None = None
        self._result: Tensor | None = None
        self.executed: list[Slice] = []
        """Slices whose backward has run, or whose score; of a shared micro-batch the pieces that this rank has."""

    def run(self) -> None:
        """All actions; the gradients are summed over this rank's micro-batches then."""
        verbs: dict[ActionKind, Callable[[Action], None]] = {
            "receive": self._receive,
            "keep_input": self._keep_input,
            "forward": self._forward,
            "forward_kv": self._forward_kv,
            "recompute_forward": self._recompute_forward,
            "backward": self._backward,
            "weight_grads": self._weight_grads,
            "send": self._send,
            "score": self._score,
        }
        if self._links:
            self._links.begin(self._turns)
        at, where = None, ""
        with self._trainer.prepared(self._program, self.wgrads):
            for action in self._program:
                if action.op != at or action.op.micro_batch < 0:
                    at = action.op
                    self._loaded = self._received = self._result = None
                    number = at.micro_batch
                    where = f"{WORDS[at.kind]} of {'a dummy' if number < 0 else f'micro-batch {number}'}"
                    self._mark(where)
                    if self._links:
                        self._links.turn(at)
                if action.computes and action.kind != "weight_grads":
                    self._trainer.entering(where)
                verbs[action.kind](action)
        self._loaded = self._received = self._result = None
        self.wgrads.check_empty()
        if self._links:
            self._mark("hand-over to other pipeline stages")
            self._links.finish()
        self._trainer.tape.check_empty()
        if self._prefix:
            self._prefix.check_empty()

    def _receive(self, action: Action) -> None:
        assert self._links is not None
        if action.op.kind == "F":
            loaded = self._loaded = self._trainer.load(action.micro_batch, self._prefix)
            taken = self._taken[self._stage - 1]
        else:
            loaded, taken = self._graphs[action.graph].loaded, self._taken[self._stage + 1]
        number = 0 if self._scores else taken[action.op]
        self._received = self._links.receive(action.op, self._trainer.empty_like_input(loaded.pack), number)

    def _send(self, action: Action) -> None:
        assert self._links is not None
        assert self._result is not None
        self._links.send(action.op, self._result)
        if self._scores:
            self._links.wait_for_sends(_SENT_AHEAD)
        if action.op.kind == "F" and self._result.requires_grad:
            self._trainer.free_output(self._result)  # what is under way is held by the links

    def _keep_input(self, action: Action) -> None:
        assert self._loaded is not None
        assert self._received is not None
        pack = self._loaded.pack
        self._trainer.tape.write(pack.slices, pack.segments, self._received.flatten(0, 1))

    def _forward(self, action: Action) -> None:
        loaded = self._loaded or self._trainer.load(action.micro_batch, self._prefix)
        self._graphs[action.graph] = graph = self._with_graph(action, loaded, self._received)
        self._result = graph.output

    def _forward_kv(self, action: Action) -> None:
        loaded, received = self._loaded, self._received
        if loaded is None or action.micro_batch != self._plan.micro_batches[action.op.micro_batch]:
            loaded = self._trainer.load(action.micro_batch, self._prefix)
            received = None if received is None else self._from_tape(loaded.pack, free=False)
        with torch.no_grad(), self._running(action):
            self._result = self._trainer.forward(loaded, received, action)

    def _score(self, action: Action) -> None:
        loaded = self._loaded or self._trainer.load(action.micro_batch, self._prefix)
        with torch.no_grad(), self._running(action):
            self._result = self._trainer.forward(loaded, self._received, action)
        for sequence, _, stop in action.micro_batch.slices:
            if self._prefix and stop == self._plan.lengths[sequence]:
                self._prefix.release(sequence)
        self.executed += loaded.pack.slices

    def _recompute_forward(self, action: Action) -> None:
        loaded = self._trainer.load(action.micro_batch, self._prefix)
        received = self._from_tape(loaded.pack, free=True) if self._stage else None
        self._graphs[action.graph] = graph = self._with_graph(action, loaded, received)
        if self._stage < self._plan.limits.num_stages - 1:
            self._trainer.free_output(graph.output)

    def _backward(self, action: Action) -> None:
        graph = self._graphs.pop(action.graph)
        with self._running(action):
            self._result = self._trainer.backward(graph, self._received)
        self.executed += graph.loaded.pack.slices

    def _weight_grads(self, action: Action) -> None:
        with self._trainer.weight_grads(), self._clock.running("W", action.op.micro_batch):
            self.wgrads.run(action.graph)

    def _with_graph(self, action: Action, loaded: Loaded, received: Tensor | None) -> Graph:
        """A forward whose backward will come; what was received becomes a leaf."""
        if received is not None:
            received.requires_grad_()
        with offloading(action.offload, self._trainer.blocks, self._trainer.device), self._running(action):
            return Graph(loaded, received, self._trainer.forward(loaded, received, action))

    @contextmanager
    def _running(self, action: Action) -> Iterator[None]:
        """Around what computes: timed, its weight gradients left where they have a W, with all ranks that share it."""
        if action.is_shared:
            assert self._plane is not None
            assert action.op.kind != "W"
            self._plane.meet(action.op.micro_batch, self._plan.digest, action.micro_batch.ranks, action.op.kind)
        splitting = self.wgrads.splitting(action.graph) if action.defers_wgrad else nullcontext()
        with self._clock.running(SPAN_KINDS[action.kind], action.op.micro_batch), splitting:
            yield

    def _from_tape(self, pack: Pack, *, free: bool) -> Tensor:
        """The stage's input of a pack, token by token from what was received for other ones."""
        space = self._trainer.empty_like_input(pack)
        if not pack.slices:
            return space.zero_()  # a dummy beside peers that run something
        self._trainer.tape.gather(pack.slices, pack.segments, space.flatten(0, 1), free=free)
        return space
