"""Weights of targets, drawn so that a recipe is proved for any of them: negative ones and zeros among the others.

By sequence each has one number, by token each target its own. No tenant's weights, and not those of the batch, cancel
out: their sum is at least `_LEFT` times that of their magnitudes, else the loss would be a ratio of rounding errors.
Centred ones differ by both, and add up to 0, those of each tenant by themselves. Their divisor is that of the data, or
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...core.aliases import Floats, Ints
from ...runtime.attention.labels import Labels, weighed
from ...runtime.attention.pack import IGNORE, TokensOf

By = Literal["sequence", "token", "centred"]
KINDS: tuple[By, ...] = "sequence", "token", "centred"
ZERO, NEGATIVE = 0.15, 0.2
"""Shares of the weights."""
_LEFT = 0.2
_DRAWS = 16


def drawn_weights(
    labels: Labels | None, tokens_of: TokensOf, lengths: Ints, by: By, seed: Sequence[int], tenants: Ints | None = None
) -> Labels:
    """The labels of a batch with weights that are drawn ``by`` sequence or token; where all draws cancel out, the last
    one without signs and zeros. Every tenant keeps a target. A divisor that the labels have stays."""
    random, known = np.random.default_rng(seed), labels and labels.weights
    owners = np.zeros(len(lengths), dtype=np.int64) if tenants is None else tenants
    if by == "centred":
        of_tokens = [_weights(random, int(n), "token", plain=True) for n in lengths]  # no two are equal
        drawn = [_weights(random, 1, "sequence") + own for own in of_tokens]
        divisors = {
            one: (known and known.set_divisor(one)) or random.uniform(1, 99) for one in np.unique(owners).tolist()
        }
        rows = _centred(drawn, _targets(labels, lengths), owners)
        return weighed(labels, tokens_of, lengths, rows.__getitem__, divisors[0] if tenants is None else divisors)
    for left in reversed(range(_DRAWS)):
        drawn = [_weights(random, int(length), by, plain=not left) for length in lengths]
        weighted = weighed(labels, tokens_of, lengths, drawn.__getitem__, known.divisor if known else None)
        if not left or all(_usable(weighted, np.flatnonzero(owners == owner)) for owner in np.unique(owners)):
            break
    return weighted


def scale_of(labels: Labels | None, lengths: Ints) -> float:
    """What a loss with a given divisor is compared by, as it may itself be near 0: the sum of the magnitudes of its
    weights / the divisor; 0 of any other loss."""
    if labels is None or labels.weights is None or labels.weights.set_divisor() is None:
        return 0.0
    targets, weights = _targets(labels, lengths), labels.weights
    return sum(float(np.abs(weights.of(i)[own]).sum()) for i, own in enumerate(targets)) / weights.divisor_of()


def _centred(drawn: list[Floats], targets: list[Ints], owners: Ints) -> list[Floats]:
    """The weights minus the mean of those of each owner's targets; of an owner of one target 1."""
    for owner in np.unique(owners):
        places = np.flatnonzero(owners == owner).tolist()
        own = np.concatenate([drawn[i][targets[i]] for i in places])
        for i in places:
            drawn[i] = drawn[i] - own.mean() if len(own) > 1 else np.ones(len(drawn[i]))
    return drawn


def _targets(labels: Labels | None, lengths: Ints) -> list[Ints]:
    """Places of the targets in each sequence."""
    if labels is None:
        return [np.arange(1, length) for length in lengths]
    return [1 + np.flatnonzero(labels.of(index)[1:length] != IGNORE) for index, length in enumerate(lengths)]


def _weights(random: np.random.Generator, length: int, by: By, *, plain: bool = False) -> Floats:
    count, shares = length if by == "token" else 1, [0.0, 0.0, 1.0] if plain else [ZERO, NEGATIVE, 1 - ZERO - NEGATIVE]
    return np.broadcast_to(random.choice([0.0, -1.0, 1.0], count, p=shares) * random.uniform(0.25, 2.0, count), length)


def _usable(labels: Labels, places: Ints) -> bool:
    assert labels.weights is not None
    sums = labels.weights.sums[places]
    return bool(abs(sums.sum()) > _LEFT * np.abs(sums).sum())
