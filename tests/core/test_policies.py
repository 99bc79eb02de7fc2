"""An objective of domains as weights of their sequences: the sum of mean losses, in value and gradient."""

import numpy as np
import pytest
from evenload.core.policies import objective_weights
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 2**32))
def test_weighted_sums_are_the_sum_of_the_domains_mean_losses(seed):
    """In value and gradient: a token counts as in the mean of its domain, whatever its loss."""
    rng = np.random.default_rng(seed)
    domain, targets = np.append(rng.integers(0, 4, 20), [0, 1, 2, 3]), rng.integers(1, 50, 24)
    objective = rng.dirichlet(np.ones(4))
    weights = objective_weights(tuple(objective), domain, targets.astype(float))
    assert weights / (weights @ targets) == pytest.approx((objective / np.bincount(domain, targets))[domain], rel=1e-12)
    assert weights @ targets == pytest.approx(targets.sum(), rel=1e-12), "as large as that of a mean"


def test_what_is_not_in_a_batch_takes_nothing_from_the_others():
    weights = objective_weights((0.5, 0.3, 0.2), np.array([0, 2, 2]), np.array([10.0, 4.0, 1.0]))
    assert weights == pytest.approx([0.5 / 0.7 * 15 / 10, 0.2 / 0.7 * 15 / 5, 0.2 / 0.7 * 15 / 5])
    assert not objective_weights((0.0, 1.0), np.array([0, 0]), np.array([3.0, 4.0])).any()
    negative = objective_weights((0.5, 0.5), np.array([0, 1]), np.array([-3.0, 4.0]))
    assert negative.tolist() == [0.0, 1.0], "weights of the data that add up to less than nothing"
