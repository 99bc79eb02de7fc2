"""Noise by which tokens are drawn, a pure function of (seed, prompt, sample, place, token).

    token = argmax_v (log p_v + G_v),   G_v = -log(-log(u_v)),   u_v in (0, 1) from the v-th output of SplitMix64

is a draw from p (Gumbel's maximum), so that a text depends on weights, prompt and seed alone: not on the batch that it
is made in, nor on order, rank, or interruption. SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014) is seeded by a hash of what tells one place of one sample from all others. No generator of numpy or
torch is used: their streams may change between releases. Bits are the same in numpy and in torch; the logarithms of
the two may differ in the last digit.

Shape legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints

Words = TypeVar("Words", Ints, Tensor)
"""64 bits each, as int64, whose products and sums wrap around."""

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def hashed(state: Words, word: Words | int) -> Words:
    """A state and one more word that it depends on, mixed."""
    return _mixed(state + word + _STEP)


def stream_of(seed: int, prompt: int, sample: int) -> int:
    """What tells a sample from all others, int64."""
    state: Ints = np.zeros(1, dtype=np.int64)
    for word in (seed, prompt, sample):
        state = hashed(state, np.array([word], dtype=np.int64))
    return int(state[0])


def gumbel(streams_R: Words, places_R: Words, tokens_V: Words) -> Words:
    """Gumbel noise of the tokens at one place of each sample, float64 [R, V].

    Args:
        streams_R: `stream_of` each sample.
        places_R: of the token that is drawn in its sequence, prompt included.
        tokens_V: 0 .. V - 1.
    """
    seeds_R1 = hashed(streams_R, places_R)[:, None]
    bits_RV = _mixed(seeds_R1 + (tokens_V + 1) * _STEP)
    high_RV: Any = _shifted(bits_RV, 12)
    xp: Any = torch if isinstance(high_RV, Tensor) else np
    wide_RV = high_RV.double() if isinstance(high_RV, Tensor) else np.asarray(high_RV, dtype=np.float64)
    noise: Words = -xp.log(-xp.log((wide_RV + 0.5) * 2.0**-52))
    return noise


def _mixed(z: Words) -> Words:
    """What SplitMix64 makes of its state: each bit depends on all."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shifted(z, 31)


def _shifted(z: Words, bits: int) -> Words:
    """Shifted right without regard to the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
