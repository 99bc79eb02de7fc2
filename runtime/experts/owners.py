"""Who has which piece of an expert's weights between passes, and where the gradients of copies come to.

    home       every rank has a layer's E/R neighbouring experts whole; passes fetch copies alone
    sharded    every rank has one piece of every expert (LAER-MoE, arXiv 2602.11686: fully sharded expert parallelism);
               passes fetch a rank's own experts, too, so that one layout of experts costs as much as another

Shape legend: R = ranks of a group, E = experts, S = weights of a piece, N = weights of an expert, with padding R S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ...core.experts.messages import Hops, Message, hops_of, hops_of_pieces
from ...core.plan.expert_policy import LayerCopies

PlaceOf = Callable[[Message], Tensor]
"""The elements of a message, as a view or a copy."""
Gradients = list[Tensor | None]


class Owner(ABC):
    """What a rank has of a layer's experts.

    Attributes:
        tensors: its parameters, as autograd is to know them.
        shapes: of the parameters of one expert.
        size: elements of one expert, padding included.
    """

    tensors: list[Tensor]
    shapes: list[torch.Size]
    size: int

    @abstractmethod
    def fetched(self, copies: LayerCopies, rank: int) -> tuple[int, ...]:
        """The experts that a rank fetches for a pass: in the order of its slots, the last ones."""

    @abstractmethod
    def hops(self, copies: LayerCopies) -> Hops:
        """The messages that bring them."""

    @abstractmethod
    def sent(self, messages: Iterable[Message]) -> PlaceOf:
        """The elements of the first messages, of which this rank sends the given ones."""

    @abstractmethod
    def arriving(self, messages: Iterable[Message]) -> tuple[PlaceOf, Callable[[], Gradients]]:
        """Where to add the gradients that come back for the messages which this rank has sent, zero now; and then the
        gradients of its tensors, None for those of which it has sent nothing."""

    def empty(self, *sizes: int) -> Tensor:
        """An uninitialised tensor of the parameters' type, where they are."""
        return self.tensors[0].detach().new_empty(*sizes)

    def tensors_of(self, flat_N: Tensor) -> list[Tensor]:
        """The tensors of an expert, in their shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = torch.split(flat_N[: sum(sizes)], sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class HomeOwner(Owner):
    """Every expert whole, at its home. ``parameters``: for each expert of this rank its tensors, in one order."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]]) -> None:
        self._parameters = [list(one) for one in parameters]
        self._own = len(parameters)
        self.tensors = [parameter for one in parameters for parameter in one]
        self.shapes = [parameter.shape for parameter in parameters[0]]
        self.size = sum(shape.numel() for shape in self.shapes)

    def fetched(self, copies: LayerCopies, rank: int) -> tuple[int, ...]:
        return copies[rank]

    def hops(self, copies: LayerCopies) -> Hops:
        return hops_of(copies, self._own)

    def sent(self, messages: Iterable[Message]) -> PlaceOf:
        experts = {m.expert for m in messages}
        with torch.no_grad():
            whole = {e: torch.cat([p.flatten() for p in self._parameters[e % self._own]]) for e in experts}
        return _places(whole, self.size)

    def arriving(self, messages: Iterable[Message]) -> tuple[PlaceOf, Callable[[], Gradients]]:
        sums = {e: self.empty(self.size).zero_() for e in {m.expert for m in messages}}

        def gradients() -> Gradients:
            of_index = {expert % self._own: self.tensors_of(total) for expert, total in sums.items()}
            return [one for index in range(self._own) for one in of_index.get(index, [None] * len(self.shapes))]

        return _places(sums, self.size), gradients


class ShardedOwner(Owner):
    """One piece of every expert.

    Args:
        shards_ES: this rank's pieces; the piece of rank r is elements [r S, (r + 1) S) of a padded expert.
        shapes: of the parameters of one expert.
        num_ranks: R.
    """

    def __init__(self, shards_ES: Tensor, shapes: list[torch.Size], num_ranks: int) -> None:
        self.tensors, self.shapes = [shards_ES], shapes
        self.size = num_ranks * shards_ES.shape[1]
        self._own = shards_ES.shape[0] // num_ranks

    def fetched(self, copies: LayerCopies, rank: int) -> tuple[int, ...]:
        return *range(rank * self._own, (rank + 1) * self._own), *copies[rank]

    def hops(self, copies: LayerCopies) -> Hops:
        return hops_of_pieces([self.fetched(copies, rank) for rank in range(len(copies))])

    def sent(self, messages: Iterable[Message]) -> PlaceOf:
        shards_ES = self.tensors[0].detach()
        return lambda message: shards_ES[message.expert]

    def arriving(self, messages: Iterable[Message]) -> tuple[PlaceOf, Callable[[], Gradients]]:
        sums_ES = torch.zeros_like(self.tensors[0])
        return lambda message: sums_ES[message.expert], lambda: [sums_ES]


def _places(experts: dict[int, Tensor], size: int) -> PlaceOf:
    return lambda message: experts[message.expert][slice(*message.bounds(size))]
