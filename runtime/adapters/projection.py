"""A random projection of gradients that adds up over shards: no parameter is gathered.

    projected[c] = sum over elements e of sign(name, e, c) g[e] / sqrt(columns)             sign: +1 or -1, a hash

Signs depend on a parameter's name and an element's place in the whole parameter alone. So the projection of a shard, of
tensor or pipeline parallelism or of ZeRO, is a partial sum, and one sum of ``columns`` numbers over ranks gives the
whole (LESS, arXiv 2402.04333, has Rademacher signs of whole gradients). Inner products stay as they are on average
(Johnson, Lindenstrauss). O(elements x columns), on the device of the gradients.

    word(e, b) = mixed(mixed(e ^ key) ^ mixed(b))        key: of seed and name; column 64 b + i has bit i

mixed: SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014), its constant added before.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .dropout import mixed, signed

_ELEMENTS = 1 << 10
"""That are projected at once."""
_GAMMA = 0x9E3779B97F4A7C15


def projection(name: str, values: Tensor, places_E: Tensor, columns: int, seed: int = 0) -> Tensor:
    """float64 [..., columns], the part of a shard; products are in float32, or in float64 where the values are.

    Args:
        name: of the parameter.
        values: [..., E] those elements of its gradients that are here: signs are made once for all of them.
        places_E: int64, where each stands in the whole parameter, flattened.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    key, device = int.from_bytes(digest, "little", signed=True), values.device
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    blocks_B = _mixed(torch.arange(-(-columns // 64), device=device))
    bytes_8 = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    signs_of_byte = 1.0 - 2.0 * bytes_8.to(values.dtype)
    total: Tensor = values.new_zeros(*values.shape[:-1], columns, dtype=torch.float64)
    for part, places in zip(torch.split(values, _ELEMENTS, -1), torch.split(places_E, _ELEMENTS), strict=True):
        words_EB = _mixed(_mixed(places ^ key)[:, None] ^ blocks_B)
        signs = torch.nn.functional.embedding(words_EB.view(torch.uint8).int(), signs_of_byte)
        total += part @ signs.flatten(1)[:, :columns]
    projected: Tensor = total * float(columns) ** -0.5
    return projected


def preconditioned(gradient: Tensor, mean: Tensor, square: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    """Adam's direction if the next gradient were this one, without the correction of bias: what LESS projects of a
    training sample. ``mean``, ``square``: Adam's moments; all of one form."""
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    square = betas[1] * square + (1 - betas[1]) * gradient**2
    return mean / (square.sqrt() + eps)


def _mixed(words: Tensor) -> Tensor:
    return mixed(words + signed(_GAMMA))
