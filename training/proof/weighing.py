"""Weights of targets, drawn so that a recipe is proved for any of them: negative ones and zeros among the others.

By sequence each has one number, by token each target its own. No tenant's weights, and not those of the batch, cancel
out: their sum is at least `_LEFT` times that of their magnitudes, else the loss would be a ratio of rounding errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...core.aliases import Floats, Ints
from ...runtime.attention.labels import Labels, weighed
from ...runtime.attention.pack import TokensOf

By = Literal["sequence", "token"]
BOTH: tuple[By, By] = "sequence", "token"
ZERO, NEGATIVE = 0.15, 0.2
"""Shares of the weights."""
_LEFT = 0.2
_DRAWS = 16


def drawn_weights(
    labels: Labels | None, tokens_of: TokensOf, lengths: Ints, by: By, seed: Sequence[int], tenants: Ints | None = None
) -> Labels:
    """The labels of a batch with weights that are drawn ``by`` sequence or token; where all draws cancel out, the last
    one without signs and zeros. Every tenant keeps a target."""
    random = np.random.default_rng(seed)
    owners = np.zeros(len(lengths), dtype=np.int64) if tenants is None else tenants
    for left in reversed(range(_DRAWS)):
        drawn = [_weights(random, int(length), by, plain=not left) for length in lengths]
        weighted = weighed(labels, tokens_of, lengths, drawn.__getitem__)
        if not left or all(_usable(weighted, np.flatnonzero(owners == owner)) for owner in np.unique(owners)):
            break
    return weighted


def _weights(random: np.random.Generator, length: int, by: By, *, plain: bool) -> Floats:
    count, shares = length if by == "token" else 1, [0.0, 0.0, 1.0] if plain else [ZERO, NEGATIVE, 1 - ZERO - NEGATIVE]
    return np.broadcast_to(random.choice([0.0, -1.0, 1.0], count, p=shares) * random.uniform(0.25, 2.0, count), length)


def _usable(labels: Labels, places: Ints) -> bool:
    assert labels.weights is not None
    sums = labels.weights.sums[places]
    return bool(abs(sums.sum()) > _LEFT * np.abs(sums).sum())
