"""The corrected mean is unbiased whatever the cheap scorer does, and its interval holds what it says it holds."""

import math
from functools import cache

import numpy as np
import pytest
from evenload.core.corrected_mean import corrected_mean, drawn, t_quantile
from evenload.core.errors import EvenloadError

KEYS = [f"sample {n}" for n in range(400)]


def biased(rng, dear):
    """A scorer that is far off, and the more so the higher the score."""
    return 3 * dear - 2 + rng.normal(0, 0.3, len(dear))


def heavy_tailed(rng, dear):
    return dear + 0.5 + 0.1 * rng.standard_t(2.1, len(dear))


def spread(rng, dear):
    """A scorer with an error of its own for every sample."""
    return dear + 0.5 + rng.normal(0, 0.4, len(dear))


@cache
def chosen_by(seed):
    return np.flatnonzero(drawn(KEYS, 0.15, seed))


def estimate(cheap, dear, seed, **how):
    return corrected_mean(cheap, dear[chosen_by(seed)], chosen_by(seed), **how)


@pytest.mark.parametrize("scorer", [biased, heavy_tailed])
def test_the_mean_is_unbiased_over_draws(scorer):
    rng = np.random.default_rng(0)
    dear = rng.uniform(0, 1, len(KEYS))
    cheap = scorer(rng, dear)
    errors = np.array([estimate(cheap, dear, seed).mean - dear.mean() for seed in range(2000)])
    assert abs(errors.mean()) < 3 * errors.std() / math.sqrt(len(errors))
    assert abs(cheap.mean() - dear.mean()) > 0.4


@pytest.mark.parametrize("of_these", [True, False])
def test_intervals_cover_where_errors_are_spread(of_these):
    """Also the mean over all samples like these, 0.5, which the mean over these is not."""
    rng, covered = np.random.default_rng(1), 0
    for seed in range(2000):
        dear = rng.uniform(0, 1, len(KEYS))
        mean = estimate(spread(rng, dear), dear, seed, of_these=of_these)
        covered += mean.low <= (dear.mean() if of_these else 0.5) <= mean.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_rare_errors_are_missed_as_often_as_it_says():
    """One sample in a hundred is badly off: the interval covers the mean seldom, and the probability says why."""
    rng, missed, covered, said = np.random.default_rng(2), 0, 0, []
    for seed in range(2000):
        dear = rng.uniform(0, 1, len(KEYS))
        cheap = np.where(bad := rng.random(len(KEYS)) < 0.01, dear + 50, dear + rng.normal(0, 0.01, len(KEYS)))
        mean = estimate(cheap, dear, seed)
        missed += not bad[chosen_by(seed)].any()
        covered += mean.low <= dear.mean() <= mean.high
        said.append(mean.missed(0.01))
    assert covered / 2000 < 0.63
    assert missed / 2000 == pytest.approx(np.mean(said), abs=3 * math.sqrt(0.25 / 2000))
    assert mean.missed(0.01) == pytest.approx(0.99**mean.drawn)


def test_a_draw_follows_the_key_alone():
    """Neither order nor company, and no score: any part of the samples draws the same of them."""
    chosen = drawn(KEYS, 0.3)
    assert (drawn(KEYS[::-1], 0.3) == chosen[::-1]).all()
    assert (drawn(KEYS[100:], 0.3) == chosen[100:]).all()
    assert chosen.mean() == pytest.approx(0.3, abs=0.08)
    assert chosen[drawn(KEYS, 0.1)].all(), "a larger share holds the smaller one"
    assert (drawn(KEYS, 0.3, seed=1) != chosen).any()
    assert drawn(KEYS, 1.0).all()
    assert not drawn(KEYS, 0.0).any()
    many = [f"{n}" for n in range(20_000)]
    assert drawn(many, 0.1).mean() == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 20_000))


def test_all_drawn_is_the_dear_mean_without_doubt():
    dear = np.array([0.25, 0.5, 1.0])
    mean = corrected_mean(np.array([7.0, -3.0, 0.0]), dear, np.arange(3))
    assert (mean.mean, mean.low, mean.high) == pytest.approx([dear.mean()] * 3, abs=1e-15)
    wide = corrected_mean(np.array([7.0, -3.0, 0.0]), dear, np.arange(3), of_these=False)
    assert wide.high - wide.mean == pytest.approx(4.302652730 * dear.std(ddof=1) / math.sqrt(3))


def test_quantiles_of_student():
    """Tables have 12.706, 4.303, 3.182, 2.776, 2.228, 1.984 and 1.960."""
    known = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 10: 2.2281, 100: 1.9840, 10**9: 1.9600}
    assert {n: t_quantile(n) for n in known} == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize(
    ("cheap", "dear", "places", "said"),
    [
        ([1.0, 2.0], [1.0], [0], "two dear scores"),
        ([1.0, 2.0], [1.0, 1.0], [0, 0], "not of samples each"),
        ([1.0, 2.0], [1.0, 1.0], [0, 2], "not of samples each"),
        ([1.0, 2.0], [1.0, 1.0], [0, -1], "not of samples each"),
        ([1.0, 2.0], [1.0, math.nan], [0, 1], "no finite number"),
        ([1.0, math.inf], [1.0, 1.0], [0, 1], "no finite number"),
    ],
)
def test_what_cannot_be_is_refused(cheap, dear, places, said):
    with pytest.raises(EvenloadError, match=said):
        corrected_mean(np.array(cheap), np.array(dear), np.array(places))
