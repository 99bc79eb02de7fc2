"""Costs of decode steps: fits against what was put in."""

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.core.costs.decode import fit_decode

COSTS = 6e-3, 2e-5, 1.7e-8


def test_measured_steps_give_the_coefficients_back():
    random = np.random.default_rng(0)
    rows, keys = random.integers(1, 64, 40), random.integers(100, 200_000, 40)
    seconds = COSTS[0] + COSTS[1] * rows + COSTS[2] * keys
    fitted = fit_decode(rows, keys, seconds)
    assert (fitted.step_s, fitted.row_s, fitted.key_s) == pytest.approx(COSTS, rel=1e-6)
    noisy = fit_decode(rows, keys, seconds * (1 + 0.02 * random.normal(size=40)))
    assert noisy.step_s == pytest.approx(COSTS[0], rel=0.05)


def test_no_coefficient_is_negative():
    rows, keys = np.array([1, 2, 4, 8]), np.array([10, 100, 50, 400])
    fitted = fit_decode(rows, keys, np.array([1.0, 0.9, 0.8, 0.7]))
    assert min(fitted.step_s, fitted.row_s, fitted.key_s) == 0 < fitted.step_s


@pytest.mark.parametrize("rows", [[4, 4, 4], [1, 2], []])
def test_steps_that_show_no_cost_are_refused(rows):
    values = np.array(rows)
    with pytest.raises(EvenloadError, match="what a sample and a key cost"):
        fit_decode(values, 10 * values, np.ones(len(rows)))
