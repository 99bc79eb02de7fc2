"""The mean of a dear score, from a cheap score of all samples and the dear one of a drawn share of them.

    mean      = mean(cheap) + mean(d over the drawn),   d = dear - cheap     unbiased, however wrong cheap scores are
    variance  = (1/n - 1/N) var(d)                    of the mean over these N samples, n of them drawn
              + var(dear) / N                         of the mean over all samples like these
    interval  = mean -+ t(n - 1) sqrt(variance)       95 %

The difference estimator of survey sampling (Cochran, Sampling Techniques, 1977), for samples of any population
prediction-powered inference (Angelopoulos et al., arXiv 2301.09633). An interval rests on the errors that were drawn:
an error in a share p of the samples is missed with probability (1 - p)^n, and then the interval knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from .aliases import Floats, Ints
from .errors import refuse_first

Z = NormalDist().inv_cdf(0.975)


class CorrectedMean(NamedTuple):
    """An estimated mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    drawn: int
    """Samples that have a dear score."""

    def missed(self, share: float) -> float:
        """The probability that no sample was drawn of a share of samples whose cheap scores are off."""
        return float((1 - share) ** self.drawn)


def drawn(keys: Iterable[str], share: float, seed: int = 0, least: int = 0) -> NDArray[np.bool_]:
    """Whether each sample is drawn, bool [N]: by the hash of its key, so never by a score, a rank or its place.

    ``least``: so many are drawn, if there are as many, however small the share.
    """
    words = np.array([xxhash.xxh3_64_intdigest(key.encode("utf-8", "replace"), seed) for key in keys], np.uint64)
    values = (words >> np.uint64(11)) * 2.0**-53
    border = np.sort(values)[:least].max(initial=-1.0)
    chosen: NDArray[np.bool_] = (values < share) | (values <= border)
    return chosen


def corrected_mean(cheap: Floats, dear: Floats, places: Ints, *, of_these: bool = True) -> CorrectedMean:
    """The mean of the dear score.

    Args:
        cheap: the cheap score of each sample [N].
        dear: the dear scores [n] of the samples at ``places`` [n], which `drawn` or another draw chose blindly.
        of_these: the mean over these N samples; else over all samples like them.

    Raises EvenloadError for fewer than two dear scores, places that are none or come twice, or a score that is no
    finite number.
    """
    num, count = len(cheap), len(dear)
    once = len(np.unique(places)) == count == len(places) and all(0 <= place < num for place in places)
    finite = bool(np.isfinite(cheap).all() and np.isfinite(dear).all())
    refuse_first(
        (count < 2, "a corrected mean needs two dear scores", f"{count} of {num} samples", "draw a larger share"),
        (not once, "dear scores are not of samples each", f"{count} scores, {len(places)} places", "give a place each"),
        (not finite, "a score is no finite number", "NaN or infinity", "leave the sample out, or mend its scorer"),
    )
    error = dear - cheap[places]
    variance = (1 / count - 1 / num) * error.var(ddof=1) + (0.0 if of_these else dear.var(ddof=1) / num)
    mean, half = float(cheap.mean() + error.mean()), t_quantile(count - 1) * sqrt(variance)
    return CorrectedMean(mean, mean - half, mean + half, count)


def t_quantile(freedom: int) -> float:
    """Student's t that 2.5 % of draws exceed, by degrees of freedom; within 1 % from 3 on, exact for 1 and 2."""
    if freedom < 3:
        return (12.706204736, 4.302652730)[freedom - 1]
    z2 = Z * Z
    terms = (z2 + 1) / 4, (5 * z2**2 + 16 * z2 + 3) / 96, (3 * z2**3 + 19 * z2**2 + 17 * z2 - 15) / 384
    return float(Z * (1 + sum(term / freedom**power for power, term in enumerate(terms, 1))))
