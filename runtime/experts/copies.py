"""Copies of experts on other ranks, as one differentiable fetch: weights out before experts run, gradients home behind.

Parameters, optimizer states and checkpoints stay where they are: a copy is an activation. One autograd function sends
weights by the messages of `core.experts.messages` and, in its backward, the copies' gradients by the same messages
backwards, where they are added in the order of ranks. An expert without copies gets no gradient from it. Tokens and
probabilities pass through the function, so that their own way back begins behind it: all ranks of a group send in one
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

Wait = Callable[[], None]


class Journey(NamedTuple):
    """Where this rank stands among the messages of one layer's pass."""

    hops: Hops
    copies: tuple[int, ...]
    """The experts that this rank has copies of."""
    first: int
    """The first expert whose home it is."""
    own: int
    """How many follow."""
    rank: int
    """In the group."""
    group: Any

    @property
    def sends(self) -> tuple[int, ...]:
        """Experts of this rank that others copy."""
        return tuple(sorted({m.expert for m in self.hops[0] if m.sender == self.rank}))


class Fetch:
    """The weights of a layer's copies on this rank, on their way since it was made.

    Args:
        parameters: for each expert of this rank its tensors, in one order.
        keep: hold the copies until the backward; else they are fetched again there.
        waited: is called with the seconds that this rank has waited for them.
    """

    def __init__(
        self,
        journey: Journey,
        parameters: Sequence[Sequence[Tensor]],
        *,
        keep: bool = True,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.journey, self.keep, self._waited = journey, keep, waited
        self._parameters = [list(one) for one in parameters]
        self._shapes = [p.shape for p in self._parameters[0]]
        self.size = sum(p.numel() for p in self._parameters[0])
        self.copies_CN: Tensor | None = None
        self._start()

    def arrived(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Tokens and probabilities as they are, and for each copy its tensors. Collective."""
        flat = [parameter for one in self._parameters for parameter in one]
        tokens, probs, copies_CN = _Copied.apply(self, tokens, probs, *flat)  # type: ignore[no-untyped-call]
        # Without its graph, which knows this object and would keep it, and itself, for ever.
        self.copies_CN = None if self.keep else copies_CN.detach()
        return tokens, probs, [self._tensors(copy_N) for copy_N in copies_CN]

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
        """The gradients of this rank's parameters that copies of them have gathered; None of experts without copies.
        Collective."""
        journey, gradient_CN = self.journey, gradient_CN.contiguous()
        place = {expert: index for index, expert in enumerate(journey.copies)}
        arrived: dict[int, Tensor] = {e: gradient_CN.new_zeros(self.size) for e in journey.sends}
        if journey.hops[1]:
            gradient_CN = self._pieces_summed(gradient_CN, place)
        back = _reversed(journey.hops[0])
        _exchange(back, self, lambda expert: gradient_CN[place[expert]], arrived, add=True)
        result: list[Tensor | None] = []
        for expert in range(journey.first, journey.first + journey.own):
            known = arrived.get(expert)
            result += [None] * len(self._shapes) if known is None else self._tensors(known)
        return result

    def _pieces_summed(self, gradient_CN: Tensor, place: dict[int, int]) -> Tensor:
        """Of experts that came in pieces, the piece that came from home holds the sum of all copies' gradients."""
        journey, summed_CN = self.journey, gradient_CN.clone()
        views = {expert: summed_CN[index] for expert, index in place.items()}
        back = _reversed(journey.hops[1])
        _exchange(back, self, lambda expert: gradient_CN[place[expert]], views, add=True)
        return summed_CN

    def _start(self) -> None:
        self.copies_CN = self.empty(len(self.journey.copies), self.size)
        with torch.no_grad():
            of = {e: self._weights(e - self.journey.first) for e in self.journey.sends}
        self._wait = _exchange(self.journey.hops[0], self, of.__getitem__, self._views(), wait=False)

    def _finish(self) -> None:
        self._wait()
        if self.journey.hops[1]:
            views = self._views()
            _exchange(self.journey.hops[1], self, views.__getitem__, views)
        self._wait = _nothing

    def empty(self, *sizes: int) -> Tensor:
        """Of the parameters' type, where they are."""
        return self._parameters[0][0].detach().new_empty(*sizes)

    def _views(self) -> dict[int, Tensor]:
        assert self.copies_CN is not None
        return dict(zip(self.journey.copies, self.copies_CN, strict=True))

    def _weights(self, index: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._parameters[index]])

    def _tensors(self, flat_N: Tensor) -> list[Tensor]:
        sizes = [shape.numel() for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(torch.split(flat_N, sizes), self._shapes, strict=True)]

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


def _nothing() -> None:
    """A wait for what has arrived."""


def _reversed(messages: Sequence[Message]) -> tuple[Message, ...]:
    swapped = (m._replace(sender=m.receiver, receiver=m.sender) for m in messages)
    return tuple(sorted(swapped))


def _exchange(
    messages: Sequence[Message],
    fetch: Fetch,
    source: Callable[[int], Tensor],
    into: dict[int, Tensor],
    *,
    add: bool = False,
    wait: bool = True,
) -> Wait:
    """Send and receive what a rank has of ``messages``, in one all-to-all, and return what waits for its end.

    Args:
        source: the weights of an expert that this rank sends from [N].
        into: by expert where they arrive [N].
        add: add to what is there, in the order of senders; else write over it.
    """
    journey, size = fetch.journey, fetch.size
    ranks = range(dist.get_world_size(journey.group))
    sent = sorted((m for m in messages if m.sender == journey.rank), key=lambda m: m.receiver)
    received = [m for m in messages if m.receiver == journey.rank]
    leaving = [sum(m.length(size) for m in sent if m.receiver == other) for other in ranks]
    coming = [sum(m.length(size) for m in received if m.sender == other) for other in ranks]
    pieces = [source(m.expert)[slice(*m.bounds(size))] for m in sent]
    buffer, arriving = torch.cat([fetch.empty(0), *pieces]), fetch.empty(sum(coming))
    work = dist.all_to_all_single(arriving, buffer, coming, leaving, group=journey.group, async_op=True)

    def finish() -> None:
        work.wait()
        parts = torch.split(arriving, [m.length(size) for m in received])
        for message, part in zip(received, parts, strict=True):
            place = into[message.expert][slice(*message.bounds(size))]
            place.add_(part) if add else place.copy_(part)

    if wait:
        finish()
        return _nothing
    return finish
