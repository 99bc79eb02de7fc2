"""Loads of experts for the scripts of this folder: drawn, as steep as a paper's busiest rank is over the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from evenload.core.aliases import Ints

Imbalance = Callable[[Ints], float]
"""Of tokens of each rank for each expert [R, E]: the busiest rank's over the mean one's."""


class Drawn(NamedTuple):
    """What is drawn: routed tokens of a rank are ``tokens * topk``."""

    ranks: int
    experts: int
    topk: int
    tokens: int

    def counts(self, steepness: float, seed: int) -> Ints:
        """Tokens of each rank for each expert [R, E]: Zipf over shuffled experts, none with more than all tokens of a
        rank, each rank a Dirichlet sample of them."""
        rng = np.random.default_rng(seed)
        share = np.arange(1, self.experts + 1) ** -steepness
        share = np.minimum(share / share.sum(), 1 / self.topk)
        share = rng.permutation(share / share.sum())
        return np.stack(
            [rng.multinomial(self.tokens * self.topk, rng.dirichlet(200 * share)) for _ in range(self.ranks)]
        )

    def like(self, wanted: float, imbalance: Imbalance, draws: int) -> list[Ints]:
        """Loads whose imbalance is so much on average, by bisection of the steepness."""
        low, high, loads = 0.0, 3.0, list[Ints]()
        for _ in range(30):
            middle = (low + high) / 2
            loads = [self.counts(middle, seed) for seed in range(draws)]
            reached = float(np.mean([imbalance(counts) for counts in loads]))
            low, high = (middle, high) if reached < wanted else (low, middle)
        return loads
