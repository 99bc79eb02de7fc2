"""Which token plain generation takes, written out in numpy: what the samples of a trainer are compared with.

    token = argmax_v (l_v / temperature + G_v)      over the tokens that top-k and top-p leave; l: logits
    G_v = -log(-log(u_v))                           u_v: the v-th output of SplitMix64, in (0, 1)

SplitMix64 is seeded by a hash of seed, prompt, sample and place, word by word. A temperature of 0 takes the largest
logit. Nothing of `runtime.generate` computes here.

Shape legend: V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...core.aliases import Floats
from ...runtime.generate.request import Sampling

_STEP = np.uint64(0x9E3779B97F4A7C15)


def noise(words: Iterable[int], vocabulary: int) -> Floats:
    """Gumbel noise of every token [V] at one place; ``words``: seed, prompt, sample, and the place in the sequence."""
    state: Any = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mixed(state + np.uint64(word) + _STEP)
    outputs = _mixed(state + np.arange(1, vocabulary + 1, dtype=np.uint64) * _STEP)
    uniform_V = ((outputs >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    drawn_V: Floats = -np.log(-np.log(uniform_V))
    return drawn_V


def scores(logits_V: Floats, noise_V: Floats, sampling: Sampling, slack: float = 0.0) -> Floats:
    """What the taken token has most of [V]; -inf of tokens that may not be drawn.

    ``slack``: by how much more top-k's logits and top-p's probability let through, less where it is negative.
    """
    if not sampling.temperature:
        return logits_V
    scaled_V = logits_V / sampling.temperature
    order = np.argsort(-scaled_V, kind="stable")
    stays = np.ones(len(order), dtype=bool)
    if 0 < sampling.top_k < len(order):
        stays = scaled_V >= scaled_V[order[sampling.top_k - 1]] - slack
    if sampling.top_p < 1.0:
        shares = np.exp(log_probs(np.where(stays, scaled_V, -np.inf))[order])
        stays[order] &= np.cumsum(shares) - shares < sampling.top_p + slack
    stays[order[0]] = True
    return np.where(stays, scaled_V + noise_V, -np.inf)


def log_probs(logits_V: Floats) -> Floats:
    """Logarithms of the probabilities that logits stand for."""
    shifted_V = logits_V - logits_V.max()
    normed_V: Floats = shifted_V - np.log(np.exp(shifted_V).sum())
    return normed_V


def _mixed(z: Any) -> Any:
    """What SplitMix64's finaliser makes of 64 bits each."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
