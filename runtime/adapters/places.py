"""Which linear layers can be adapted, where each one's outputs lie in the module that computes them on this rank, and
what this rank has of an adapter's matrices.

A module of the trainer may hold several linear layers of the model (queries, keys and values; gate and up), and a
tensor-parallel rank holds a part of each. Tenants know the layers by their Hugging Face names, whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention.pack import Pack

A, B = "lora_A", "lora_B"


class Place(NamedTuple):
    """One linear layer of the model, as far as this rank computes it."""

    name: str
    """Its module's path in the Hugging Face model."""
    outputs: int
    """Of the whole layer."""
    inputs: int
    rows: tuple[int, int]
    """Outputs that this rank computes: from the first on, up to the second."""
    columns: tuple[int, int]
    """Inputs that this rank has."""
    groups: int = 1
    """The module's outputs are so many groups of equal size, of each of which the layer has a run."""
    first: int = 0
    """Output of a group where the run begins."""

    @property
    def run(self) -> int:
        return (self.rows[1] - self.rows[0]) // self.groups

    def shares(self, kind: str) -> bool:
        """Whether tensor-parallel ranks hold different parts of a matrix."""
        return self.columns != (0, self.inputs) if kind == A else self.rows != (0, self.outputs)

    def part_of(self, whole: Tensor, kind: str) -> Tensor:
        """What this rank has of a matrix: a view."""
        return whole[:, slice(*self.columns)] if kind == A else whole[slice(*self.rows)]

    def shape_of(self, kind: str, rank: int) -> tuple[int, int]:
        """The shape of this rank's part of a matrix."""
        return (rank, self.columns[1] - self.columns[0]) if kind == A else (self.rows[1] - self.rows[0], rank)

    def whole_shape(self, kind: str, rank: int) -> tuple[int, int]:
        return (rank, self.inputs) if kind == A else (self.outputs, rank)


class Site(NamedTuple):
    """A module of the trainer that computes linear layers: y = f(x), or (y, bias), of x [..., inputs]."""

    module: nn.Module
    places: tuple[Place, ...]
    """In the order of their runs."""
    sums: Literal["", "products", "gradients"] = ""
    """What tensor-parallel ranks sum: x A^T, where their inputs differ; its gradient, where their outputs do."""
    group: dist.ProcessGroup | None = None
    """Of these ranks."""

    @property
    def name(self) -> str:
        """The name of the site's first layer."""
        return self.places[0].name


class AdaptedBlock(NamedTuple):
    """A module whose call carries the pack, with the sites inside it. It runs anew in every replay of its layer."""

    carrier: nn.Module
    pack_of: Callable[[tuple[Any, ...], dict[str, Any]], Pack]
    """The pack of a call, from its arguments."""
    sites: tuple[Site, ...]


def linears_in(blocks: Sequence[AdaptedBlock]) -> list[str]:
    """The names of the linear layers of blocks, in their order."""
    return [place.name for block in blocks for site in block.sites for place in site.places]


class AdapterState(NamedTuple):
    """An adapter whole, as it is saved and handed on: between layouts, worlds and trainers.

    Tensors on the CPU by name: ``<module>.lora_A`` [r, inputs] and ``<module>.lora_B`` [outputs, r].
    """

    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    """Adam's first moments; empty: zero."""
    second: Mapping[str, Tensor]
    """Adam's second moments; empty: zero."""
    steps: int
    """Updates so far."""


def drawn(place: Place, kind: str, rank: int, seed: int) -> Tensor:
    """A matrix at its start, whole, float32: B is zero and A is drawn from Kaiming's uniform distribution (a^2 = 5),
    as PEFT has it; the same on every rank, layout and trainer."""
    if kind == B:
        return torch.zeros(place.outputs, rank)
    digest = hashlib.blake2b(f"{seed}:{place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    bound = 1 / math.sqrt(place.inputs)
    return torch.empty(rank, place.inputs).uniform_(-bound, bound, generator=generator)
