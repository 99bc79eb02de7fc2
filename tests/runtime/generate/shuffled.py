"""A dealer that moves samples at random, after few forwards: alike on every rank, and of no use but to tests."""

from dataclasses import replace

import numpy as np
from evenload.runtime.generate.dealing import Dealer, Dealing, GenerationStats, SampleAssignment


class Shuffled(Dealer):
    """Deals about half of the samples that live again at every border."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.seen: GenerationStats | None = None

    def deal(self, dealing: Dealing) -> SampleAssignment:
        draw = np.random.default_rng([self._seed, int(dealing.tokens.sum()), int(dealing.ended.sum())])
        count, size = len(dealing.of), dealing.num_ranks
        anew = (dealing.ranks < 0) | (draw.random(count) < 0.5)
        ranks = np.where(anew, draw.integers(0, size, count), dealing.ranks)
        return replace(dealing, ranks=ranks).as_it_is._replace(forwards=draw.integers(1, 7, size), dealer="shuffled")

    def ran(self, stats: GenerationStats) -> None:
        self.seen = stats
