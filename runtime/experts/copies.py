"""Experts fetched for a pass, as one differentiable function: weights out before they run, gradients home after.

Parameters and optimizer states stay where they are (`owners`): a copy is an activation. One autograd function sends
weights by the messages of `core.experts.messages` and, in its backward, the copies' gradients by the same messages
backwards, where they are added in the order of ranks. What is not fetched gets no gradient from it. Tokens and
probabilities pass through the function, so that their own way back begins after it: all ranks of a group send in one
order, also those that have no copy themselves.

Copies are kept from forward to backward, or let go and fetched again right before the backward of their layer.

Shape legend: N = weights of an expert, C = copies on this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...core.experts.messages import Hops, Message
from .owners import Owner, PlaceOf

Wait = Callable[[], None]


class Journey(NamedTuple):
    """Where this rank stands among the messages of one layer's pass."""

    hops: Hops
    copies: tuple[int, ...]
    """The experts that this rank fetches."""
    rank: int
    """In the group."""
    group: Any

    @property
    def sent(self) -> list[Message]:
        """Messages of this rank's own weights."""
        return [m for m in self.hops[0] if m.sender == self.rank]

    @property
    def received(self) -> list[Message]:
        """Messages with weights from other ranks."""
        return [m for hop in self.hops for m in hop if m.receiver == self.rank != m.sender]


class Fetch:
    """The weights of a layer's copies on this rank, on their way since it was made.

    Args:
        owner: of what this rank has between passes.
        keep: hold the copies until the backward; else they are fetched again there.
        waited: is called with the seconds that this rank has waited for them.
    """

    def __init__(
        self, journey: Journey, owner: Owner, *, keep: bool = True, waited: Callable[[float], None] = lambda _: None
    ) -> None:
        self.journey = journey
        self.owner = owner
        self.keep = keep
        self._waited = waited
        self.copies_CN: Tensor | None = None
        self._start()

    @property
    def received_bytes(self) -> int:
        """Weights that other ranks send to this one."""
        elements = sum(message.length(self.owner.size) for message in self.journey.received)
        return elements * self.owner.empty(0).element_size()

    def arrived(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Tokens and probabilities as they are, and for each copy its tensors. Collective."""
        parameters = self.owner.tensors
        tokens, probs, copies_CN = _Copied.apply(self, tokens, probs, *parameters)  # type: ignore[no-untyped-call]
        # Without its graph, which knows this object and would keep it, and itself, for ever.
        self.copies_CN = None if self.keep else copies_CN.detach()
        return tokens, probs, [self.owner.tensors_of(copy_N) for copy_N in copies_CN]

    def saving(self) -> AbstractContextManager[Any]:
        """Around the products with copies: what their backward needs of the copies is let go if they are not kept."""
        if self.keep or not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._let_go, self._bring_back)

    def again_behind(self, output: Tensor) -> Tensor:
        """The experts' output, whose backward fetches copies that were let go."""
        if self.keep or not torch.is_grad_enabled():
            return output
        fetched: Tensor = _Again.apply(output, self)  # type: ignore[no-untyped-call]
        self.copies_CN = None
        return fetched

    def fetch(self) -> Tensor:
        """The copies [C, N]. Collective."""
        if self.copies_CN is None:
            self._start()
        start = time.perf_counter()
        self._finish()
        self._waited(time.perf_counter() - start)
        assert self.copies_CN is not None
        return self.copies_CN

    def home(self, gradient_CN: Tensor) -> list[Tensor | None]:
        """The gradients of this rank's parameters that copies have gathered; None of those that nobody has fetched.
        Collective."""
        journey, gradient_CN = self.journey, gradient_CN.contiguous()
        if journey.hops[1]:
            gradient_CN = self._pieces_summed(gradient_CN)
        into, gradients = self.owner.arriving(journey.sent)
        _exchange(_reversed(journey.hops[0]), self, self._places(gradient_CN), into, add=True)()
        return gradients()

    def _pieces_summed(self, gradient_CN: Tensor) -> Tensor:
        """The gradients; of experts in pieces, the piece that came from home has the sum over all copies."""
        summed_CN = gradient_CN.clone()
        back = _reversed(self.journey.hops[1])
        _exchange(back, self, self._places(gradient_CN), self._places(summed_CN), add=True)()
        return summed_CN

    def _start(self) -> None:
        journey = self.journey
        self.copies_CN = self.owner.empty(len(journey.copies), self.owner.size)
        source = self.owner.sent(journey.sent)
        self._wait = _exchange(journey.hops[0], self, source, self._places(self.copies_CN))

    def _finish(self) -> None:
        self._wait()
        if self.journey.hops[1]:
            assert self.copies_CN is not None
            places = self._places(self.copies_CN)
            _exchange(self.journey.hops[1], self, places, places)()
        self._wait = _nothing

    def _places(self, rows_CN: Tensor) -> PlaceOf:
        """The elements of messages among the rows of this rank's copies."""
        index = {expert: place for place, expert in enumerate(self.journey.copies)}
        return lambda message: rows_CN[index[message.expert]][slice(*message.bounds(self.owner.size))]

    def _let_go(self, saved: Tensor) -> Any:
        copies_CN = self.copies_CN
        if copies_CN is None or saved.untyped_storage().data_ptr() != copies_CN.untyped_storage().data_ptr():
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def _bring_back(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self.copies_CN is not None
        return self.copies_CN.as_strided(*saved)


class _Copied(torch.autograd.Function):
    """(tokens, probabilities, parameters) to (tokens, probabilities, copies [C, N])."""

    @staticmethod
    def forward(ctx: Any, fetch: Fetch, tokens: Tensor, probs: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.fetch = fetch
        return tokens.view_as(tokens), probs.view_as(probs), fetch.fetch()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tokens, probs, copies_CN = gradients
        ctx.fetch.copies_CN = None
        return None, tokens, probs, *ctx.fetch.home(copies_CN)


class _Again(torch.autograd.Function):
    """The output of experts; copies are fetched again when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch = fetch
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.fetch.fetch()
        return gradients[0], None


def _nothing() -> None: ...


def _reversed(messages: Sequence[Message]) -> tuple[Message, ...]:
    swapped = (m._replace(sender=m.receiver, receiver=m.sender) for m in messages)
    return tuple(sorted(swapped))


def _exchange(messages: Sequence[Message], fetch: Fetch, source: PlaceOf, into: PlaceOf, *, add: bool = False) -> Wait:
    """Begin to send and receive what a rank has of ``messages``, in one all-to-all, and return what waits for its end.

    Args:
        source: the elements of a message that this rank sends.
        into: where those of one that it receives belong.
        add: add to what is there, in the order of senders; else write over it.
    """
    journey, size = fetch.journey, fetch.owner.size
    ranks = range(dist.get_world_size(journey.group))
    sent = sorted((m for m in messages if m.sender == journey.rank), key=lambda m: m.receiver)
    received = [m for m in messages if m.receiver == journey.rank]
    leaving = [sum(m.length(size) for m in sent if m.receiver == other) for other in ranks]
    coming = [sum(m.length(size) for m in received if m.sender == other) for other in ranks]
    empty = fetch.owner.empty
    buffer, arriving = torch.cat([empty(0), *map(source, sent)]), empty(sum(coming))
    work = dist.all_to_all_single(arriving, buffer, coming, leaving, group=journey.group, async_op=True)

    def finish() -> None:
        work.wait()
        parts = torch.split(arriving, [m.length(size) for m in received])
        for message, part in zip(received, parts, strict=True):
            place = into(message)
            place.add_(part) if add else place.copy_(part)

    return finish
