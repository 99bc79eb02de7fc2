"""The history of loads: the first step as it is, then a mean in which the newest counts most."""

import numpy as np
from evenload.core.experts.history import DECAY, updated


def test_the_newest_step_counts_most_and_old_ones_fade():
    steps = np.random.default_rng(0).integers(0, 100, (30, 2, 4)).astype(float)
    history = ()
    for step in steps:
        history = updated(history, step)
    weights = np.array([DECAY**29, *((1 - DECAY) * DECAY**age for age in range(28, -1, -1))])
    assert np.isclose(weights.sum(), 1)
    np.testing.assert_allclose(history, np.einsum("s,sle->le", weights, steps))
    assert updated((), steps[0]) == tuple(tuple(row) for row in steps[0].tolist())
    assert {type(value) for row in history for value in row} == {float}
