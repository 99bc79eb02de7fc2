"""Win rates of pairs with intervals by a bootstrap over prompts, and the rate at equal style.

    x = (a - b) / (a + b)      of the words, list items and headings of two texts; 0 where both have none
    E[verdict] = sigmoid(c + t sign(x of words) + s x)      fractional logistic regression

The rate at equal style is sigmoid(c). The sign makes strata of texts that are longer and shorter, for judges that ask
which is longer and not by how much.
The pairs of a prompt are drawn together and weigh one prompt together. Percentiles are those of a bootstrap with
Student's t in place of the normal distribution (Hesterberg, arXiv 1411.5279), so that few prompts are not certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import erfc, lgamma, log, sqrt
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.corrected_mean import t_quantile

REPLICATES = 2000
FEWEST = 6
"""Prompts: five of five heads are no rare luck."""
STYLES = {"words": re.compile(r"\S+"), "list items": re.compile(r"(?m)^\s*(?:[-*+•]|\d+[.)])\s")}
STYLES |= {"headings": re.compile(r"(?m)^#{1,6}\s")}
_RIDGE = 0.01
"""Of a squared coefficient: where a style decides every verdict, it would grow without end."""
_NUMBERS = 1 << 21
"""Weights that are drawn at once."""


class Rate(NamedTuple):
    """How far A is preferred, from 0 to 1, with its 95 % interval."""

    rate: float
    low: float
    high: float
    prompts: int


def counts_of(texts: Sequence[tuple[str, str]]) -> Ints:
    """How often each style occurs in both texts of each pair, int64 [P, 2, styles]."""
    counts = [[[len(style.findall(text)) for style in STYLES.values()] for text in pair] for pair in texts]
    return np.array(counts, np.int64)


def rate_of(values: Floats, of: Ints) -> Rate | None:
    """The mean over prompts of verdicts [P] on pairs of the prompts ``of`` [P]; None for fewer than two prompts."""
    _, of = np.unique(of, return_inverse=True)
    num = int(of.max(initial=-1)) + 1
    if num < 2:
        return None
    means = np.bincount(of, values) / np.bincount(of)
    rates = np.concatenate([weights @ means / num for weights in _weights(num)])
    return _interval(float(means.mean()), rates, num, 1)


def rate_at_equal_style(values: Floats, of: Ints, counts: Ints) -> Rate | str:
    """The win rate of texts that are alike in style, or the style of which the verdicts cannot tell it."""
    a, b = counts[:, 0], counts[:, 1]
    differences = (a - b) / np.maximum(a + b, 1)
    for style, x in zip(STYLES, differences.T, strict=True):
        for name, other in (("A", x <= 0), ("B", x >= 0)):
            if len(np.unique(of[other])) < FEWEST:
                return f"{name} has more {style} for all but {len(np.unique(of[other]))} prompts"
    x = np.concatenate([np.ones((len(values), 1)), np.sign(differences[:, :1]), differences], 1)
    x = x[:, np.abs(x).max(0) > 0]
    num, share = int(of.max()) + 1, 1 / np.bincount(of)[of]
    fit = _fitted(share[None], values, x, np.zeros((1, x.shape[1])), 20)
    drawn = [_fitted(weights[:, of] * share, values, x, fit, 4)[:, 0] for weights in _weights(num)]
    return _interval(float(_sigmoid(fit[0, 0])), _sigmoid(np.concatenate(drawn)), num, x.shape[1])


def _fitted(weights: Floats, values: Floats, x: Floats, begin: Floats, steps: int) -> Floats:
    """Coefficients [R, 1 + styles] of regressions by weights [R, P], by Newton's method."""
    num, size = len(weights), x.shape[1]
    products, ridge = (x[:, :, None] * x[:, None]).reshape(len(x), -1), _RIDGE * (np.arange(size) > 0)
    theta = np.repeat(begin, num // len(begin), 0)
    for _ in range(steps):
        mean = _sigmoid(theta @ x.T)
        slope = (weights * (values - mean)) @ x - ridge * theta
        curve = ((weights * mean * (1 - mean)) @ products).reshape(num, size, size) + np.diag(ridge)
        theta += np.linalg.solve(curve, slope[:, :, None])[:, :, 0]
    return theta


def _sigmoid(z: Floats) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
    return rates


def _weights(num: int) -> Iterator[Floats]:
    """How often each of ``num`` prompts is in each replicate, float64 [R, num], some replicates at a time."""
    random, most = np.random.default_rng(0), max(1, _NUMBERS // num)
    for start in range(0, REPLICATES, most):
        size = min(most, REPLICATES - start)
        places = random.integers(num, size=(size, num)) + num * np.arange(size)[:, None]
        yield np.bincount(places.ravel(), minlength=size * num).reshape(size, num).astype(np.float64)


def _interval(rate: float, rates: Floats, num: int, parameters: int) -> Rate:
    freedom = max(1, num - parameters)
    tail = erfc(t_quantile(freedom) * sqrt(num / freedom / 2)) / 2
    low, high = np.quantile(rates, [tail, 1 - tail])
    return Rate(rate, min(float(low), rate), max(float(high), rate), num)


def sign_test(wins: int, losses: int) -> float:
    """The probability of prompts won and lost at least as unevenly by the toss of a coin; two-sided, without ties."""
    num, most = wins + losses, max(wins, losses)
    logs = [lgamma(num + 1) - lgamma(k + 1) - lgamma(num - k + 1) - num * log(2) for k in range(most, num + 1)]
    return min(1.0, 2 * float(np.exp(logs).sum()))
