"""Distributions fitted to samples that ended and that did not; features that help and that do not."""

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.plugins.rollout.lengths import SampledLengths, _moments, fit_lengths
from evenload.plugins.rollout.student_t import NU, density, survival

LIMIT = 4096


def sampled(mu, sigma, count, limit, seed=0):
    """``count`` samples of each prompt, cut at a limit."""
    random = np.random.default_rng(seed)
    of = np.repeat(np.arange(len(mu)), count)
    tokens = np.minimum(np.exp(mu[of] + sigma * random.standard_t(NU, size=len(of))), limit).astype(np.int64)
    tokens = np.maximum(tokens, 1)
    return SampledLengths(of, tokens, tokens < limit, np.ones(len(of)))


def centres(count, seed=1):
    return np.log(1000) + 0.8 * np.random.default_rng(seed).normal(size=count)


def test_many_samples_give_their_own_distribution():
    mu = centres(40)
    fitted = fit_lengths(sampled(mu, 0.5, 400, 1 << 40), 40, LIMIT)
    assert np.abs(fitted.mu - mu).max() < 0.15
    assert fitted.sigma.mean() == pytest.approx(0.5, abs=0.02)


def test_samples_that_were_cut_are_longer_than_the_cut():
    """Half of them are: as ended ones they would say 0.3 less on average."""
    mu = np.full(50, np.log(1000.0))
    cut = sampled(mu, 0.5, 40, 1000)
    assert 0.45 < 1 - np.mean(cut.ended) < 0.55
    fitted = fit_lengths(cut, 50, LIMIT)
    assert fitted.mu.mean() == pytest.approx(np.log(1000), abs=0.03)
    assert fitted.sigma.mean() == pytest.approx(0.5, abs=0.05)


def test_a_prompt_whose_samples_all_live_is_foreseen_as_longer():
    data = sampled(centres(40), 0.4, 8, 1 << 40)
    lives = data.prompts == 3
    data = data._replace(tokens=np.where(lives, 3000, data.tokens), ended=~lives)
    fitted = fit_lengths(data, 40, LIMIT)
    ended = fit_lengths(data._replace(ended=np.ones_like(lives)), 40, LIMIT)
    assert np.isfinite(fitted.mu).all()
    assert np.log(3000) + 1.5 > fitted.mu[3] > np.log(3000) + 0.1 > ended.mu[3]


def test_moments_of_what_lives_are_those_of_the_tail():
    z = np.array([-1.5, 0.0, 2.0])
    for value, w, wz, wzz in zip(z, *_moments(z.copy(), np.zeros(3, np.bool_)), strict=True):
        edges = value + np.sinh(np.linspace(0, 14, 200_001))
        t = (edges[1:] + edges[:-1]) / 2
        mass = density(t) * np.diff(edges) / survival(np.array(value))
        weight = (NU + 1) / (NU + t * t)
        expected = [float(mass @ (weight * t**power)) for power in (0, 1, 2)]
        assert [w, wz, wzz] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_few_samples_are_held_by_those_of_all_prompts():
    mu = centres(60)
    data = sampled(mu, 0.5, 30, LIMIT)
    few = (data.prompts != 0) | (np.arange(len(data.prompts)) < 1)
    data = SampledLengths(*(np.asarray(part)[few] for part in data))
    fitted = fit_lengths(data, 61, LIMIT)
    own = float(np.log(data.tokens[0]))
    mean = float(np.mean(fitted.mu[1:60]))
    assert min(own, mean) < fitted.mu[0] < max(own, mean)
    assert fitted.mu[60] == pytest.approx(mean, abs=0.05), "a prompt without samples"
    assert fitted.sigma[60] > fitted.sigma[0] > fitted.sigma[1:60].mean()


def test_older_epochs_count_for_less():
    old, new = sampled(np.full(10, 6.0), 0.3, 20, LIMIT), sampled(np.full(10, 7.0), 0.3, 20, LIMIT, 1)
    both = [np.concatenate([a, b]) for a, b in zip(old, new, strict=True)]

    def mean(weight):
        weights = np.concatenate([np.full(200, weight), np.ones(200)])
        return float(fit_lengths(SampledLengths(both[0], both[1], both[2], weights), 10, LIMIT).mu.mean())

    assert mean(0.01) == pytest.approx(7.0, abs=0.1)
    assert mean(0.01) > mean(0.3) > mean(1.0)


def with_features(informative):
    """True mu of prompts without samples, and what is said of them without features and with some."""
    random = np.random.default_rng(5)
    mu = centres(200)
    features = random.normal(size=(200, 12))
    if informative:
        features[:, 3] = mu + 0.2 * random.normal(size=200)
    data = sampled(mu, 0.4, 4, LIMIT)
    seen = data.prompts < 150
    data = SampledLengths(*(np.asarray(part)[seen] for part in data))
    plain, fitted = fit_lengths(data, 200, LIMIT), fit_lengths(data, 200, LIMIT, features)
    return mu[150:], plain.mu[150:], fitted.mu[150:]


def test_features_are_used_where_they_foresee_prompts_and_else_not():
    mu, plain, fitted = with_features(True)
    assert np.mean((fitted - mu) ** 2) < 0.3 * np.mean((plain - mu) ** 2)
    _, plain, fitted = with_features(False)
    np.testing.assert_array_equal(plain, fitted)


def of(prompts, tokens):
    return SampledLengths(prompts, tokens, np.ones(len(tokens), np.bool_), np.ones(len(tokens)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (of(np.array([], int), np.array([], int)), "no lengths"),
        (of(np.array([0, 1]), np.array([5])), "unevenly"),
        (of(np.array([0]), np.array([0])), "no token"),
        (of(np.array([7]), np.array([5])), "of no prompt"),
    ],
)
def test_what_says_nothing_of_lengths_is_refused(data, message):
    with pytest.raises(EvenloadError, match=message):
        fit_lengths(data, 2, LIMIT)


def test_features_of_other_prompts_are_refused():
    with pytest.raises(EvenloadError, match="no row a prompt"):
        fit_lengths(of(np.array([0]), np.array([5])), 2, LIMIT, np.zeros((3, 4)))
