"""How long the samples of a prompt will be: a distribution for each prompt, from samples that ended and that did not.

TIE (arXiv 2604.00499): log lengths are Student's t with 3.5 degrees of freedom, cut at the limit. A network predicts
its mu and sigma there; in a trainer prompts come again every epoch, several samples each, so they are fitted here:

    ln X = c_p + tau * normal + sigma_p * t,    X at most the limit          c_p: the mean of prompts, or by features

by expectation-maximisation with the t as a normal of random scale. A sample that has not ended, because it lives or was
cut at the limit, counts as *more than* its tokens, exactly: with weight w = (nu + 1) / (nu + t^2),
    E[w | t > z] S(z) = S_{nu + 2}(z sqrt((nu + 2) / nu)),    E[w t | t > z] S(z) = f(z),
    E[w t^2 | t > z] S(z) = (nu + 1) S(z) - nu S_{nu + 2}(...).
mu of a prompt is shrunk to its centre by (n x_p + k c_p) / (n + k), k = sigma_p^2 / tau^2, and sigma_p to that of all
prompts; what mu may be off by is added to sigma. O(samples) a round: 8,192 samples of 512 prompts, a tenth of them
unended, in 0.25 s of CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import refuse_first
from .features import predicted_centres
from .student_t import NU, density, survival

_ROUNDS = 60
_SPREAD_COUNTS = 8.0
"""As many samples the spread of all prompts counts for in that of one."""
_LEAST_SPREAD = 0.02
"""Of a log length: lengths that are all alike have one too, else nothing could be compared with it."""


@dataclass(frozen=True)
class LengthDistributions:
    """How many tokens samples of each prompt will have: log-t with `NU` degrees of freedom, cut at a limit."""

    mu: Floats
    """Median of the log length [P]."""
    sigma: Floats
    """Its scale [P]."""
    limit: int | Ints
    """Tokens after which a sample is cut: of all prompts, or of each [P]."""

    def __post_init__(self) -> None:
        odd = np.shape(self.limit) not in ((), self.mu.shape)
        odd = odd or self.mu.shape != self.sigma.shape or not np.isfinite(self.mu).all() or not (self.sigma > 0).all()
        do = "give a finite mu and a sigma above 0 for each prompt, and a limit of 1 or more"
        detail = f"mu {self.mu.shape}, sigma {self.sigma.shape}, limit {self.limit}"
        refuse_first((bool(odd or np.min(self.limit) < 1), "these are not distributions of lengths", detail, do))

    @property
    def limits(self) -> Ints:
        """The limit of each prompt [P]."""
        return np.broadcast_to(np.asarray(self.limit, dtype=np.int64), self.mu.shape)


class SampledLengths(NamedTuple):
    """Samples of earlier epochs and of this one, those that live among them."""

    prompts: Ints
    """Number of each sample's prompt [N]."""
    tokens: Ints
    """Tokens that it has [N], 1 or more."""
    ended: Any
    """Whether it ended by itself, bool [N]; one that lives, or was cut at the limit, did not."""
    weights: Floats
    """By how much each counts [N]: 1 now, less for older epochs."""


def fit_lengths(
    sampled: SampledLengths, num_prompts: int, limit: int | Ints, features: Floats | None = None
) -> LengthDistributions:
    """The distributions of ``num_prompts`` prompts, also of those without any sample.

    ``features``: numbers of each prompt [P, F], such as its last hidden state; they move the centres of prompts where a
    ridge regression on them foresees prompts that it has not seen better than the mean does. Raises EvenloadError.
    """
    _check(sampled, num_prompts, limit, features)
    fit = _fitted(sampled, num_prompts, np.zeros(num_prompts))
    if features is not None:
        centres = predicted_centres(np.asarray(features, np.float64), fit.mu, fit.counts > 0)
        fit = fit if centres is None else _fitted(sampled, num_prompts, centres)
    return LengthDistributions(fit.mu, np.sqrt(fit.sigma**2 + fit.doubt**2), limit)


def _check(sampled: SampledLengths, num_prompts: int, limit: int | Ints, features: Floats | None) -> None:
    count = len(sampled.tokens)
    tokens, prompts = np.asarray(sampled.tokens, np.int64), np.asarray(sampled.prompts, np.int64)
    refuse_first(
        (not count, "no lengths to learn from", "no sample", "give lengths of samples, also of unended ones"),
        (len({*map(len, sampled)}) > 1, "samples are described unevenly", f"{[*map(len, sampled)]}", "one each"),
        (bool((tokens < 1).any()), "a sample has no token", f"{(tokens < 1).sum()} of {count}", "leave it out"),
        (
            bool(((prompts < 0) | (prompts >= num_prompts)).any()),
            "a sample is of no prompt",
            f"{num_prompts} prompts",
            "number prompts from 0",
        ),
        (bool(np.min(limit) < 1), "the limit of tokens is below 1", str(limit), "give the trainer's own"),
        (
            features is not None and (features.ndim != 2 or len(features) != num_prompts),
            "features are no row a prompt",
            f"{None if features is None else features.shape} for {num_prompts} prompts",
            "give an array [prompts, numbers]",
        ),
    )


class _Fit(NamedTuple):
    mu: Floats
    sigma: Floats
    doubt: Floats
    """Deviation of what mu may be [P]."""
    counts: Floats


def _fitted(sampled: SampledLengths, num_prompts: int, offsets: Floats) -> _Fit:
    """The fit whose centres are a mean plus ``offsets`` [P]."""
    of, x, weight = sampled.prompts, np.log(sampled.tokens), np.asarray(sampled.weights, np.float64)
    ended = np.asarray(sampled.ended, np.bool_)
    counts = np.bincount(of, weight, num_prompts).astype(np.float64)
    known = counts > 0
    start = float(np.median(x - offsets[of]))
    all_sigma = max(_LEAST_SPREAD, 1.2 * float(np.median(np.abs(x - offsets[of] - start))))
    mu, sigma, between = start + offsets, np.full(num_prompts, all_sigma), all_sigma**2
    doubt = np.full(num_prompts, all_sigma)
    for _ in range(_ROUNDS):
        w, wz, wzz = _moments((x - mu[of]) / sigma[of], ended)
        held = sigma**2 / between
        total = np.bincount(of, weight * w, num_prompts)
        seen = np.bincount(of, weight * (w * mu[of] + sigma[of] * wz), num_prompts)
        centre = float(np.average((mu - offsets)[known])) + offsets
        before, mu = mu, (seen + held * centre) / (total + held)
        doubt = sigma / np.sqrt(total + held)
        moved = (before - mu)[of]
        squares = weight * (w * moved**2 + 2 * moved * sigma[of] * wz + sigma[of] ** 2 * wzz)
        off = np.bincount(of, squares, num_prompts) + total * doubt**2
        all_sigma = max(_LEAST_SPREAD, math.sqrt(off.sum() / counts.sum()))
        sigma = np.sqrt((off + _SPREAD_COUNTS * all_sigma**2) / (counts + _SPREAD_COUNTS))
        between = max(_LEAST_SPREAD**2, float(np.mean(((mu - centre) ** 2 + doubt**2)[known])))
    return _Fit(mu, sigma, doubt, counts)


def _moments(z: Floats, ended: Any) -> tuple[Floats, Floats, Floats]:
    """E[w], E[w t] and E[w t^2] of each sample: at z where it ended, of all above z where it did not."""
    w = (NU + 1) / (NU + z * z)
    wz, wzz = w * z, w * z * z
    if not ended.all():
        left = z[~ended]
        above = np.maximum(survival(left), 1e-300)
        wider = survival(left * math.sqrt((NU + 2) / NU), NU + 2)
        w[~ended] = wider / above
        wz[~ended] = density(left) / above
        wzz[~ended] = (NU + 1) - NU * wider / above
    return w, wz, wzz
