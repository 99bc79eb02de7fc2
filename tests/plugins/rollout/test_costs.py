"""Seconds of decode steps: closed forms against sums."""

import numpy as np
import pytest
from evenload.plugins.rollout.costs import RolloutCosts

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
