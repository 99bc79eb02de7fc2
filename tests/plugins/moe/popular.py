"""Counts of tokens whose experts are unlike in popularity."""

import numpy as np
from evenload.core.aliases import Ints


def zipf(seed: int, exponent: float, num_ranks: int, num_experts: int, topk: int = 8) -> Ints:
    """Counts [R, E] of 8,192 tokens a rank; experts' popularity falls as a power, and none has more than all tokens."""
    rng = np.random.default_rng(seed)
    shares_E = np.arange(1, num_experts + 1) ** -exponent
    for _ in range(50):
        shares_E = np.minimum(shares_E / shares_E.sum(), 1 / topk)
    rng.shuffle(shares_E)
    return np.stack([rng.multinomial(8192 * topk, rng.dirichlet(200 * shares_E)) for _ in range(num_ranks)])
