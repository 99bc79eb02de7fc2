"""Drawn numbers that depend on a seed, an update and a sample's number alone: never on ranks, or the order of a pool.

    u(sample) = hash(seed, update, sample) in (0, 1)                 SplitMix64's finalizer (Steele et al., OOPSLA 2014)
    n without replacement, by probabilities p:  the n largest log(u) / p           (Efraimidis, Spirakis 2006)

The second draws as one would one after the other, each time by the probabilities of those that are left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Floats, Ints

Words = NDArray[np.uint64]


def mixed(words: Words) -> Words:
    """SplitMix64's finalizer of each word; the sums wrap, as they must."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniform(numbers: Ints, seed: int, update: int) -> Floats:
    """float64 [N] inside (0, 1), one for each number [N]."""
    key = mixed(mixed(np.array([seed], np.uint64)) ^ np.array([update], np.uint64))
    words = mixed(mixed(numbers.astype(np.uint64)) ^ key)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def drawn(numbers: Ints, probabilities: Floats, take: int, *, seed: int, update: int) -> Ints:
    """``take`` of the numbers [N] without replacement, by probabilities [N] that need not add up to 1.

    Raises ValueError where fewer have one above 0.
    """
    if take > np.count_nonzero(probabilities):
        raise ValueError(f"{take} samples of {np.count_nonzero(probabilities)} that may be drawn")
    with np.errstate(divide="ignore"):
        keys = np.log(uniform(numbers, seed, update)) / probabilities
    return numbers[np.lexsort((numbers, -keys))[:take]]


def largest(numbers: Ints, scores: Floats, take: int) -> Ints:
    """``take`` of the numbers [N] with the largest scores [N]; of equal ones the least numbers."""
    if take > len(numbers) or np.isnan(scores).any():
        raise ValueError(f"{take} of {len(numbers)} samples, {np.isnan(scores).sum()} without a score")
    return numbers[np.lexsort((numbers, -scores))[:take]]
