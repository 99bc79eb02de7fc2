"""A random projection of gradients that adds up over shards: no parameter is gathered.

    projected[c] = sum over elements e of sign(name, e, c) g[e] / sqrt(columns)             sign: +1 or -1, a hash

Signs depend on a parameter's name and an element's place in the whole parameter alone. So the projection of a shard, of
tensor or pipeline parallelism or of ZeRO, is a partial sum, and one sum of ``columns`` numbers over ranks gives the
whole (LESS, arXiv 2402.04333, has Rademacher signs of whole gradients). Inner products stay as they are in the mean
(Johnson, Lindenstrauss). O(elements x columns).
"""

from __future__ import annotations

import hashlib

import numpy as np

from ...core.aliases import Floats, Ints
from .draws import mixed

_ELEMENTS = 1 << 10
"""That are projected at once."""


def projection(name: str, values: Floats, places: Ints, columns: int, seed: int = 0) -> Floats:
    """float64 [..., columns], the part of a shard.

    Args:
        name: of the parameter.
        values: [..., E] those elements of its gradients that are here: signs are made once for all of them.
        places: int64 [E] where each stands in the whole parameter, flattened.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, np.uint64)
    blocks = np.arange(-(-columns // 64), dtype=np.uint64)
    total: Floats = np.zeros((*values.shape[:-1], columns))
    for first in range(0, len(places), _ELEMENTS):
        part = slice(first, first + _ELEMENTS)
        words = mixed(mixed(places[part].astype(np.uint64) ^ key)[:, None] ^ mixed(blocks)[None])
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=columns, bitorder="little")
        total += values[..., part] @ (1.0 - 2.0 * bits)
    projected: Floats = total * float(columns) ** -0.5
    return projected


def preconditioned(gradient: Floats, mean: Floats, square: Floats, betas: tuple[float, float], eps: float) -> Floats:
    """Adam's direction if the next gradient were this one, without the correction of bias: what LESS projects of a
    training sample. ``mean``, ``square``: Adam's moments; all of one form."""
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    square = betas[1] * square + (1 - betas[1]) * gradient**2
    return mean / (np.sqrt(square) + eps)
