"""An adapter whole, as it is saved and handed on: between layouts, worlds and trainers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .places import Place

A, B = "lora_A", "lora_B"


class AdapterState(NamedTuple):
    """Tensors on the CPU by name: ``<module>.lora_A`` [r, inputs] and ``<module>.lora_B`` [outputs, r]."""

    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    """Adam's first moments; empty: zero."""
    second: Mapping[str, Tensor]
    """Adam's second moments; empty: zero."""
    steps: int
    """Updates so far."""


def part_of(whole: Tensor, place: Place, kind: str) -> Tensor:
    """What this rank has of a matrix of a layer: a view."""
    return whole[:, slice(*place.columns)] if kind == A else whole[slice(*place.rows)]


def shape_of(place: Place, kind: str, rank: int) -> tuple[int, int]:
    """The shape of this rank's part of a matrix."""
    return (rank, place.columns[1] - place.columns[0]) if kind == A else (place.rows[1] - place.rows[0], rank)


def whole_shape(place: Place, kind: str, rank: int) -> tuple[int, int]:
    return (rank, place.inputs) if kind == A else (place.outputs, rank)


def drawn(place: Place, kind: str, rank: int, seed: int) -> Tensor:
    """A matrix at its start, whole, float32: B is zero and A is drawn from Kaiming's uniform distribution (a^2 = 5),
    as PEFT has it; the same on every rank, layout and trainer."""
    if kind == B:
        return torch.zeros(place.outputs, rank)
    digest = hashlib.blake2b(f"{seed}:{place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    bound = 1 / math.sqrt(place.inputs)
    return torch.empty(rank, place.inputs).uniform_(-bound, bound, generator=generator)
