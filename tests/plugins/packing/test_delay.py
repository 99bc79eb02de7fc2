"""The rule of outlier delay: who waits, for how long at most, and that what runs is even."""

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.plugins.packing.delay import outliers
from hypothesis import given
from hypothesis import strategies as st

load_plugins()
COSTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=40)


def waits(costs, waited, num_ranks, most=3):
    return outliers(np.array(costs, dtype=np.float64), np.array(waited), num_ranks, most)


def drawn(costs, num_ranks):
    return waits(costs, [0] * len(costs), num_ranks).tolist()


@pytest.mark.parametrize(
    ("costs", "num_ranks", "waiting"),
    [
        # What alone bounds the step waits; a rank's mean share is 4.
        ([1, 1, 1, 1, 9], 2, [4]),
        ([9, 1, 1, 1, 1], 2, [0]),
        ([4, 1, 1, 1, 1], 2, []),
        # As many as ranks balance each other and run; one far beyond them goes on waiting.
        ([1, 1, 1, 1, 9, 9], 2, []),
        ([1, 1, 1, 1, 9, 9], 3, [4, 5]),
        ([1, 1, 1, 1, 9, 9, 9], 3, []),
        ([1, 1, 1, 1, 9, 9, 99], 2, [6]),
        # Each costs more than the mean share of those below it; the share of all is 127 / 4.
        ([1, 2, 4, 8, 16, 32, 64], 4, [5, 6]),
        # Fewer sequences than ranks: each of them is more than a mean share, and something always runs.
        ([5, 6], 4, []),
        ([5], 1, []),
    ],
)
def test_outliers_wait_and_what_is_even_runs(costs, num_ranks, waiting):
    assert np.flatnonzero(drawn(costs, num_ranks)).tolist() == waiting


@pytest.mark.parametrize("num_ranks", [3, 7, 49, 64])
def test_equal_costs_run_whatever_the_last_bit_of_their_mean_says(num_ranks):
    assert not any(drawn([0.1] * num_ranks, num_ranks))
    assert not any(drawn([1e-7 / 3] * num_ranks, num_ranks))


def test_all_that_wait_run_with_the_one_that_is_due():
    assert waits([1, 1, 9, 50, 99], [0, 0, 2, 1, 0], 2, most=3).tolist() == [False, False, True, True, True]
    assert not waits([1, 1, 9, 50, 99], [0, 0, 3, 1, 0], 2, most=3).any()


@given(COSTS, st.integers(1, 9), st.randoms())
def test_what_waits_alone_would_bound_the_step(costs, ranks, random):
    held = np.array(drawn([float(c) for c in costs], ranks))
    assert not held.all()
    values = np.array(costs)
    runs = values[~held]
    if held.any():
        assert values[held].min() > runs.max()
        assert values[held].min() > runs.sum() / ranks
    elif len(costs) >= ranks:
        assert values.max() <= values.sum() / ranks * (1 + 1e-6)
    order = sorted(range(len(costs)), key=lambda _: random.random())
    assert drawn([float(costs[i]) for i in order], ranks) == held[order].tolist(), "the order of the batch is free"


def test_the_recipe_switches_it_on():
    def rule(most):
        recipe = parse({"plugins": {"packing": {"enabled": True, "max_delay_steps": most}}})
        ((plugin, config),) = PlanChain.of_recipe(recipe, recipe.layout(1)).links
        return plugin.hold_back(config)

    assert rule(0) is None
    assert rule(2) is not None
