"""The rule of outlier delay: who waits, for how long at most, and that what runs is even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from evenload.api import load_plugins
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.plugins.packing.delay import outliers
from hypothesis import given
from hypothesis import strategies as st

load_plugins()
COSTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=40)


def waits(costs: list[float], waited: list[int], num_ranks: int, most: int = 3) -> npt.NDArray[np.bool_]:
    return outliers(np.array(costs, dtype=np.float64), np.array(waited), num_ranks, most)


def drawn(costs: list[float], num_ranks: int) -> list[bool]:
    return waits(costs, [0] * len(costs), num_ranks).tolist()


def test_a_sequence_that_alone_bounds_the_step_waits() -> None:
    assert drawn([1, 1, 1, 1, 9], 2) == [False, False, False, False, True]
    assert drawn([9, 1, 1, 1, 1], 2) == [True, False, False, False, False]
    assert drawn([4, 1, 1, 1, 1], 2) == [False] * 5, "a rank's mean share is 4"


def test_as_many_as_ranks_balance_each_other_and_run() -> None:
    assert drawn([1, 1, 1, 1, 9, 9], 2) == [False] * 6
    assert drawn([1, 1, 1, 1, 9, 9], 3) == [False, False, False, False, True, True]
    assert drawn([1, 1, 1, 1, 9, 9, 9], 3) == [False] * 7
    # The two that cost alike run; the one far beyond them goes on waiting.
    assert drawn([1, 1, 1, 1, 9, 9, 99], 2) == [False] * 6 + [True]


@pytest.mark.parametrize("num_ranks", [3, 7, 49, 64])
def test_equal_costs_run_whatever_the_last_bit_of_their_mean_says(num_ranks: int) -> None:
    assert not any(drawn([0.1] * num_ranks, num_ranks))
    assert not any(drawn([1e-7 / 3] * num_ranks, num_ranks))


def test_all_that_wait_run_with_the_one_that_is_due() -> None:
    assert waits([1, 1, 9, 50, 99], [0, 0, 2, 1, 0], 2, most=3).tolist() == [False, False, True, True, True]
    assert not waits([1, 1, 9, 50, 99], [0, 0, 3, 1, 0], 2, most=3).any()


def test_a_batch_that_cannot_be_even_sheds_what_is_above_its_mean_share() -> None:
    """Each costs more than the mean share of those below it; the share of all is 127 / 4."""
    assert drawn([1, 2, 4, 8, 16, 32, 64], 4) == [False] * 5 + [True] * 2


def test_something_always_runs() -> None:
    """Fewer sequences than ranks: each of them is more than a mean share."""
    assert drawn([5, 6], 4) == [False, False]
    assert drawn([5], 1) == [False]


@given(COSTS, st.integers(1, 9), st.randoms())
def test_what_waits_alone_would_bound_the_step(costs: list[int], ranks: int, random: object) -> None:
    held = np.array(drawn([float(c) for c in costs], ranks))
    assert not held.all()
    values = np.array(costs)
    runs = values[~held]
    if held.any():
        assert values[held].min() > runs.max()
        assert values[held].min() > runs.sum() / ranks
    elif len(costs) >= ranks:
        assert values.max() <= values.sum() / ranks * (1 + 1e-6)
    order = sorted(range(len(costs)), key=lambda _: random.random())  # type: ignore[attr-defined]
    assert drawn([float(costs[i]) for i in order], ranks) == held[order].tolist(), "the order of the batch is free"


def test_the_recipe_switches_it_on() -> None:
    def rule(most: int) -> object:
        recipe = parse({"plugins": {"packing": {"enabled": True, "max_delay_steps": most}}})
        ((plugin, config),) = PlanChain.of_recipe(recipe, recipe.layout(1)).links
        assert plugin.hold_back is not None
        return plugin.hold_back(config)

    assert rule(0) is None
    assert rule(2) is not None
