"""Seconds of decode steps: closed forms against sums, fits against what was put in."""

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.plugins.rollout.costs import RolloutCosts, fit_costs

COSTS = RolloutCosts(6e-3, 2e-5, 1.7e-8, 4e-5)


def test_steps_are_summed_one_by_one():
    rows, keys, seconds = 7, 1000, 0.0
    for _ in range(50):
        seconds += COSTS.step_s + COSTS.row_s * rows + COSTS.key_s * keys
        keys += rows
    assert COSTS.steps_s(50, 7, 1000) == pytest.approx(seconds, rel=1e-12)


def test_work_is_what_a_sample_alone_takes_but_for_steps():
    tokens = np.array([1.0, 40.0, 900.0])
    work = COSTS.work_s(np.full(3, 30.0), tokens, tokens**2)
    alone = [COSTS.steps_s(int(n), 1, 30) + 30 * COSTS.prompt_s - n * COSTS.step_s for n in tokens]
    assert work == pytest.approx(alone, rel=1e-12)


def test_measured_steps_give_the_coefficients_back():
    random = np.random.default_rng(0)
    rows, keys = random.integers(1, 64, 40), random.integers(100, 200_000, 40)
    seconds = np.array([COSTS.steps_s(1, int(b), int(k)) for b, k in zip(rows, keys, strict=True)])
    assert fit_costs(rows, keys, seconds) == pytest.approx(COSTS._replace(prompt_s=0.0), rel=1e-6)
    noisy = fit_costs(rows, keys, seconds * (1 + 0.02 * random.normal(size=40)))
    assert noisy.step_s == pytest.approx(COSTS.step_s, rel=0.05)


def test_no_coefficient_is_negative():
    rows, keys = np.array([1, 2, 4, 8]), np.array([10, 100, 50, 400])
    assert min(fit_costs(rows, keys, np.array([1.0, 0.9, 0.8, 0.7]))) >= 0


@pytest.mark.parametrize("rows", [[4, 4, 4], [1, 2], []])
def test_steps_that_show_no_cost_are_refused(rows):
    values = np.array(rows)
    with pytest.raises(EvenloadError, match="what a sample and a key cost"):
        fit_costs(values, 10 * values, np.ones(len(rows)))
