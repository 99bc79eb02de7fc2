"""Means and tails by quadrature against plain quantiles; the queue lets nobody wait for ever."""

import numpy as np
import pytest
from evenload.plugins.rollout.lengths import LengthDistributions
from evenload.plugins.rollout.score import AGED, AGES_S, Expected, TieQueue, beta_of, expected
from evenload.plugins.rollout.student_t import exceeded_with
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 8192


def quantiles(mu, sigma, count=200_000):
    """Tokens at evenly spaced chances, the longest first."""
    z = exceeded_with((np.arange(count) + 0.5) / count)
    return np.minimum(np.exp(mu + sigma * z), LIMIT)


@pytest.mark.parametrize(("mu", "sigma"), [(5.0, 0.3), (6.5, 0.8), (8.5, 1.2)])
def test_mean_and_tail_are_those_of_all_quantiles(mu, sigma):
    said = expected(LengthDistributions(np.array([mu]), np.array([sigma]), LIMIT), np.array([0]))
    tokens = quantiles(mu, sigma)
    assert said.mean[0] == pytest.approx(tokens.mean(), rel=5e-3)
    assert said.tail[0] == pytest.approx(tokens[: len(tokens) // 10].mean(), rel=5e-3)
    assert said.squares[0] == pytest.approx((tokens**2).mean(), rel=2e-2)


@pytest.mark.parametrize("done", [100, 900, 5000])
def test_what_lives_is_foreseen_by_those_that_lived_as_long(done):
    said = expected(LengthDistributions(np.array([6.5]), np.array([0.8]), LIMIT), np.array([0]), np.array([done]))
    tokens = quantiles(6.5, 0.8, 2_000_000)
    longer = tokens[tokens > done]
    assert said.mean[0] == pytest.approx(longer.mean(), rel=1e-2)
    assert said.tail[0] == pytest.approx(longer[: len(longer) // 10].mean(), rel=1e-2)


def test_beta_grows_with_what_waits_for_a_slot():
    assert [beta_of(n, 100) for n in (0, 100, 300, 900)] == pytest.approx([0.1, 0.1, 0.3, 0.5])


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 5), st.floats(0, 100)), min_size=2, max_size=40))
def test_nobody_is_overtaken_for_ever(rows):
    """Who comes so much later that ageing makes up for the scores goes behind, whoever it is."""
    mean = np.array([float(tokens) for tokens, _, _ in rows])
    tail = mean * np.array([1 + more for _, more, _ in rows])
    arrivals = np.cumsum([pause for _, _, pause in rows])
    queue = TieQueue(Expected(mean, tail, mean**2), 4)
    for sample, now_s in enumerate(arrivals):
        queue.enter(sample, float(now_s))
    order = {queue.pop(): place for place in range(len(rows))}
    assert len(order) == len(rows)
    assert len(queue) == 0
    highest, lowest = mean + 0.5 * tail, mean + 0.1 * tail
    for first in range(len(rows)):
        for later in range(first + 1, len(rows)):
            patience_s = AGES_S * np.log(highest[first] / lowest[later]) / -np.log(AGED)
            assert order[first] < order[later] or arrivals[later] - arrivals[first] <= patience_s + 1e-6


def test_the_least_score_is_first_among_those_that_come_at_once():
    mean = np.array([50.0, 20.0, 90.0])
    queue = TieQueue(Expected(mean, np.array([60.0, 900.0, 91.0]), mean), 1)
    for sample in range(3):
        queue.enter(sample, 0.0)
    assert queue.first() == 0
    assert [queue.pop() for _ in range(3)] == [0, 2, 1], "a long tail goes behind"
