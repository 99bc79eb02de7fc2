"""Student's t against closed forms and plain sums."""

import math

import numpy as np
import pytest
from evenload.plugins.rollout.student_t import NU, density, exceeded_with, survival

Z = np.array([-40.0, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0, 30.0])


def test_survival_is_that_of_textbooks_for_whole_degrees():
    cauchy = 0.5 - np.arctan(Z) / math.pi
    x = Z / math.sqrt(3)
    three = 0.5 - (x / (1 + x * x) + np.arctan(x)) / math.pi
    np.testing.assert_allclose(survival(Z, 1.0), cauchy, rtol=1e-11)
    np.testing.assert_allclose(survival(Z, 3.0), three, rtol=1e-9)


@pytest.mark.parametrize("z", [-2.0, 0.0, 1.5, 6.0])
def test_survival_is_the_sum_of_the_density(z):
    edges = z + np.sinh(np.linspace(0, 16, 200_001))
    middle = (edges[1:] + edges[:-1]) / 2
    total = float(density(middle) @ np.diff(edges))
    assert survival(np.array(z)) == pytest.approx(total, rel=1e-6)


def test_what_is_exceeded_with_a_chance_has_that_survival():
    chances = np.array([1e-9, 1e-4, 0.05, 0.5, 0.7, 0.999])
    np.testing.assert_allclose(survival(exceeded_with(chances)), chances, rtol=2e-5)
    assert NU == 3.5
