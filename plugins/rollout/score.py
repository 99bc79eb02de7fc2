"""TIE's score of a sample that waits, and the queue that it orders (TIE, arXiv 2604.00499).

    score = E[X] + beta CVaR_0.9[X],    beta = min(0.5, max(0.1, 0.1 * waiting / slots)),    times 0.9^(waited / 30 s)

X: tokens, cut at the limit, given those that a sample has; CVaR_0.9: the mean of its longest tenth. Ageing multiplies
all scores at one rate, so the order of two never changes while they wait: the heap is kept by
ln(score) + arrival * ln(1 / 0.9) / 30 s, and one with score a goes before all that come 30 s * log_{1/0.9}(a / least
score) later. beta is that of the moment at which a sample comes.

E and CVaR are quadratures of 48 nodes over the quantiles, half of them in the longest tenth: 0.3 % off at most.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from .lengths import LengthDistributions
from .student_t import exceeded_with, survival

TAIL = 0.1
BETAS = (0.1, 0.5)
_GOLDEN = (5**0.5 - 1) / 2
AGED, AGES_S = 0.9, 30.0
"""After so many seconds a score is so many times what it was."""


def _nodes() -> tuple[Floats, Floats]:
    """Chances of being exceeded, and their weights: 24 for the longest tenth, 24 for the rest."""
    chances, weights = [], []
    for low, high, count in ((0.0, TAIL / 100, 8), (TAIL / 100, TAIL / 10, 8), (TAIL / 10, TAIL, 8), (TAIL, 1.0, 24)):
        x, w = np.polynomial.legendre.leggauss(count)
        chances.append(low + (x + 1) / 2 * (high - low))
        weights.append(w / 2 * (high - low))
    return np.concatenate(chances), np.concatenate(weights)


_CHANCES, _WEIGHTS = _nodes()
_TAIL_WEIGHTS = np.where(_CHANCES < TAIL, _WEIGHTS / TAIL, 0.0)


class Expected(NamedTuple):
    """What distributions say of each sample, in tokens [N]."""

    mean: Floats
    tail: Floats
    """Mean of the longest tenth."""
    squares: Floats
    """Mean of the squared tokens."""


def expected(distributions: LengthDistributions, prompts: Ints, done: Ints | None = None) -> Expected:
    """Whole lengths of samples of ``prompts`` [N], of which ``done`` [N] tokens are there (None: none)."""
    if done is None or not np.any(done):
        each = _quadratures(distributions, np.arange(len(distributions.mu)), None)
        return Expected(*(values[prompts] for values in each))
    return _quadratures(distributions, prompts, np.asarray(done, np.float64))


def _quadratures(distributions: LengthDistributions, prompts: Ints, done: Floats | None) -> Expected:
    tokens = _exceeded(distributions, prompts, done, np.tile(_CHANCES, (len(prompts), 1)))
    return Expected(tokens @ _WEIGHTS, tokens @ _TAIL_WEIGHTS, tokens**2 @ _WEIGHTS)


def likely_lengths(distributions: LengthDistributions, prompts: Ints, done: Ints) -> Ints:
    """One length of each sample [N], more than it has, at chances that are spread evenly: alike on every rank."""
    chances = np.asarray((np.arange(len(prompts)) + 0.5) * _GOLDEN % 1.0, np.float64)
    tokens = _exceeded(distributions, prompts, np.asarray(done, np.float64), chances[:, None])[:, 0]
    return np.clip(np.ceil(tokens).astype(np.int64), done + 1, distributions.limits[prompts])


def _exceeded(distributions: LengthDistributions, prompts: Ints, done: Floats | None, chances: Floats) -> Floats:
    """Tokens that samples exceed with ``chances`` [N, K], given those that they have."""
    mu, sigma = distributions.mu[prompts, None], distributions.sigma[prompts, None]
    if done is not None:
        with np.errstate(divide="ignore"):
            chances = chances * survival((np.log(done[:, None]) - mu) / sigma)
    z = exceeded_with(chances)
    tokens = np.minimum(np.exp(np.minimum(mu + sigma * z, 60.0)), distributions.limits[prompts, None])
    return tokens if done is None else np.maximum(tokens, done[:, None])


def beta_of(num_waiting: int, num_slots: int) -> float:
    """Weight of the tail: more of it where more samples wait for each slot."""
    low, high = BETAS
    return min(high, max(low, 0.1 * num_waiting / num_slots))


class TieQueue:
    """Samples that wait for a slot, least score first, aged."""

    def __init__(self, lengths: Expected, num_slots: int) -> None:
        self._lengths = lengths
        self._slots = num_slots
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, sample: int, now_s: float) -> None:
        """Let a sample wait from ``now_s`` on."""
        beta = beta_of(len(self._heap) + 1, self._slots)
        score = self._lengths.mean[sample] + beta * self._lengths.tail[sample]
        heapq.heappush(self._heap, (math.log(score) - now_s / AGES_S * math.log(AGED), sample))

    def first(self) -> int:
        """The sample that is next; it stays in the queue."""
        return self._heap[0][1]

    def pop(self) -> int:
        """Take the sample that is next."""
        return heapq.heappop(self._heap)[1]
