"""Carries out the program of a rank (`core.plan.program`): one step at one pipeline stage, for any trainer; at both
stages of a device that has two (`run_stages`).

What a trainer does its own way is a `StageTrainer`'s: how a pack is loaded, run forward and run backward. All else is
here: what is received and sent, the inputs on the tape, the keys and values of cut sequences, weight gradients that
wait, what goes to the host, and that ranks which share a micro-batch are at the same pass. Every token's loss is booked
in the one forward of it that has a graph. Every stage output has a backward, also without a label: the gradients of its
keys and values are wanted.

Shape legend: T = slots of a pack, C = hidden size. Stage inputs are [1, T, C] or [T, 1, C], as the trainer wants them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ...core.plan.action import LETTERS, Action, ActionKind, Program
from ...core.plan.order import StagedOp, orders_of_device, orders_of_stage
from ...core.plan.step_plan import MicroBatch, Op, Slice, StepPlan
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
_SENT_AHEAD = 1
"""Outputs of scores that wait for the next stage: in training its gradients tell what it has taken."""


class Loaded(Protocol):
    """A micro-batch in the trainer's form."""

    @property
    def pack(self) -> Pack: ...


class LoadedPack(NamedTuple):
    """A micro-batch of which a trainer needs its pack alone."""

    pack: Pack


class Graph(NamedTuple):
    """What a forward keeps for its backward."""

    loaded: Any
    received: Tensor | None
    """The stage's input, a leaf; None at the first stage."""
    output: Tensor
    """Hidden states, whose memory is gone after a `free_output`; at the last stage the loss."""


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
    """One step of one rank at a stage.

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
        self._rank = rank
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
        self._taken_beside = _taken_beside(plan, stage, rank) if self._scores and plan.merge else {}
        self._holds = links is not None and links.one_queue and not self._scores
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
        run_stages([self])

    def _run_pass(self, op: Op, actions: Sequence[Action]) -> None:
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
        where = f"{WORDS[op.kind]} of {'a dummy' if op.micro_batch < 0 else f'micro-batch {op.micro_batch}'}"
        self._mark(where)
        for action in actions:
            if action.computes and action.kind != "weight_grads":
                self._trainer.entering(where)
            verbs[action.kind](action)
        self._loaded = self._received = self._result = None

    def _finish(self) -> None:
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
        if action.op in self._taken_beside:
            self._links.release_beside(self._taken_beside[action.op])

    def _send(self, action: Action) -> None:
        assert self._links is not None
        assert self._result is not None
        self._links.send(action.op, self._result)
        if self._scores and not self._plan.merge:
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
        kind = cast(SpanKind, LETTERS[action.kind].upper())
        with self._clock.running(kind, action.op.micro_batch), splitting:
            yield

    def _from_tape(self, pack: Pack, *, free: bool) -> Tensor:
        """The stage's input of a pack, token by token from what was received for other ones."""
        space = self._trainer.empty_like_input(pack)
        if not pack.slices:
            return space.zero_()  # a dummy next to peers that run something
        self._trainer.tape.gather(pack.slices, pack.segments, space.flatten(0, 1), free=free)
        return space


def run_stages(executors: Sequence[Executor]) -> None:
    """All actions at the stages of a device, ascending, in the order of the plan's merge.

    Before each pass those results are handed on, of any of these stages, that were held back until then.
    """
    own = {one._stage: one for one in executors}
    plan, rank = executors[0]._plan, executors[0]._rank
    device = plan.limits.device_of_stage(executors[0]._stage)
    turns = send_turns(plan, device, rank) if executors[0]._holds else {}

    def take_turns(staged: StagedOp | None) -> None:
        for stage, kind in turns.get(staged, ()):
            if links := own[stage]._links:
                links.turn(kind)

    with ExitStack() as prepared:
        for one in executors:
            if one._links:
                one._links.begin(holds=one._holds)
            prepared.enter_context(one._trainer.prepared(one._program, one.wgrads))
        for stage, op, actions in _passes(plan, device, rank, {stage: one._program for stage, one in own.items()}):
            take_turns((stage, op))
            own[stage]._run_pass(op, actions)
    take_turns(None)
    for one in executors:
        one._finish()


def _taken_beside(plan: StepPlan, stage: int, rank: int) -> dict[Op, int]:
    """For each forward that comes to a stage from another device, how many outputs of the other stage of its own device
    that one had taken before: where no backward follows, what comes back of those."""
    limits = plan.limits
    device, source = (limits.device_of_stage(s) for s in (stage, max(0, stage - 1)))
    counts: dict[Op, int] = {}
    taken = 0
    for own, op in orders_of_device(plan, source)[rank] if source != device else ():
        if op.kind == "F" and own == stage - 1:
            counts[op] = taken
        taken += op.kind == "F" and own != stage - 1
    return counts


def _passes(
    plan: StepPlan, device: int, rank: int, programs: Mapping[int, Program]
) -> Iterator[tuple[int, Op, list[Action]]]:
    """The actions of every pass of these programs, with its stage; each dummy is a pass of its own."""
    left = {stage: deque(_by_pass(program)) for stage, program in programs.items()}
    for stage, op in orders_of_device(plan, device)[rank] if len(programs) > 1 else ():
        if left[stage] and left[stage][0][0].op == op:
            yield stage, op, left[stage].popleft()
    for stage, passes in left.items():  # those of one stage in its program's order
        yield from ((stage, actions[0].op, actions) for actions in passes)


def _by_pass(program: Program) -> Iterator[list[Action]]:
    for op, each in groupby(program, lambda action: action.op):
        actions = list(each)
        yield from ([actions] if op.micro_batch >= 0 else ([dummy] for dummy in actions))
