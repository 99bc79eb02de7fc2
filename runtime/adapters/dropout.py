"""Dropout that no plan can change: whether a value is kept is a hash of where it belongs, not of when it is computed.

The hash is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), which mixes a key of 64 bits to 64 bits that
pass for random. Its key is the tenant's seed, its step, the layer, the sample, the position in the sample and the
number of the input; so a slice, a replay, a tensor-parallel rank and another world drop the same values.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_BITS = 24
_SAMPLE, _POSITION, _INPUT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


def key_of(seed: int, step: int, name: str) -> int:
    """64 bits of a tenant's seed and step and a layer's name, signed."""
    digest = hashlib.blake2b(f"{seed}:{step}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def kept(key: int, samples_T: Tensor, positions_T: Tensor, columns: tuple[int, int], share: float) -> Tensor:
    """bool [T, C]: which inputs of a layer stay where ``share`` of them is dropped.

    Args:
        samples_T: number of each token's sample, int64.
        positions_T: its position in the sample, int64.
        columns: the inputs that this rank has.
    """
    inputs_C = torch.arange(*columns, dtype=torch.int64, device=positions_T.device)
    tokens_T = mixed(samples_T * signed(_SAMPLE) + positions_T * signed(_POSITION) + key)
    hashed_TC = mixed(tokens_T[:, None] + inputs_C * signed(_INPUT))
    stays_TC: Tensor = _shifted(hashed_TC, 64 - _BITS) >= round(share * 2**_BITS)
    return stays_TC


def mixed(keys: Tensor) -> Tensor:
    """SplitMix64's finalizer of each key, int64; products wrap, as they must."""
    keys = (keys ^ _shifted(keys, 30)) * signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ _shifted(keys, 27)) * signed(0x94D049BB133111EB)
    return keys ^ _shifted(keys, 31)


def sum_of_bits(values: Tensor) -> int:
    """The sum of the mixed bits of all values of a floating-point tensor, whatever their order."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.dtype.itemsize]
    return int(mixed(values.detach().contiguous().view(bits).long()).sum())


def _shifted(keys: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch knows signed integers alone."""
    return (keys >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """The signed integer that has the 64 bits of a word."""
    return word - (1 << 64) if word >> 63 else word
