"""Which linear layers can be adapted, and where each one's outputs lie in the module that computes them on this rank.

A module of the trainer may hold several linear layers of the model (queries, keys and values; gate and up), and a
tensor-parallel rank holds a part of each. Tenants know the layers by their Hugging Face names, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn

from ..attention.pack import Pack


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

    @property
    def shares_rows(self) -> bool:
        """Whether tensor-parallel ranks hold different outputs."""
        return self.rows != (0, self.outputs)

    @property
    def shares_columns(self) -> bool:
        """Whether tensor-parallel ranks hold different inputs."""
        return self.columns != (0, self.inputs)


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
