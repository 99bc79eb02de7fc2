"""Partitioning against an exact solver, and its laws."""

import numpy as np
import pulp
import pytest
from evenload.core.balance.partition import (
    BinLoad,
    balance,
    best_fit_decreasing,
    into_bins,
    karmarkar_karp,
    longest_first,
)
from hypothesis import given
from hypothesis import strategies as st

ITEMS = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def optimum(costs, num_bins):
    """Least possible largest bin, by mixed-integer programming."""
    problem = pulp.LpProblem("bins", pulp.LpMinimize)
    largest = pulp.LpVariable("largest", 0)
    put = pulp.LpVariable.dicts("put", (range(len(costs)), range(num_bins)), cat="Binary")
    problem += largest
    for i in range(len(costs)):
        problem += pulp.lpSum(put[i][b] for b in range(num_bins)) == 1
    for b in range(num_bins):
        problem += pulp.lpSum(costs[i] * put[i][b] for i in range(len(costs))) <= largest
    problem.solve(pulp.HiGHS(msg=False))
    loads = [sum(c for i, c in enumerate(costs) if put[i][b].value() > 0.5) for b in range(num_bins)]
    assert sum(loads) == sum(costs)
    return max(loads)


@pytest.mark.parametrize("seed", range(12))
def test_balance_is_within_two_percent_of_the_optimum(seed):
    draw = np.random.default_rng(seed)
    costs = np.ceil(draw.lognormal(3, 1.2, size=int(draw.integers(10, 24)))).astype(int)
    bins = balance(costs.astype(float), costs, 3, BinLoad())
    ours = np.bincount(bins, costs, 3).max()
    assert ours <= 1.02 * optimum(costs.tolist(), 3)


@given(ITEMS, st.integers(1, 8))
def test_polish_is_never_worse_than_longest_first(costs, num_bins):
    values = np.array(costs, dtype=float)
    tokens = np.array(costs)
    load = BinLoad(7.0, 600)

    def largest(bins):
        return float(load(np.bincount(bins, values, num_bins), np.bincount(bins, tokens, num_bins).astype(int)).max())

    assert largest(balance(values, tokens, num_bins, load)) <= largest(longest_first(values, num_bins)) * (1 + 1e-12)


@given(ITEMS, st.integers(1, 8))
def test_longest_first_keeps_its_guarantee(costs, num_bins):
    """The bin that ends fullest was the emptiest when its last item came: at most the mean and a share of one item."""
    loads = np.bincount(longest_first(np.array(costs, dtype=float), num_bins), costs, num_bins)
    assert loads.max() <= sum(costs) / num_bins + (1 - 1 / num_bins) * max(costs) + 1e-9
    assert loads.sum() == sum(costs)


@given(ITEMS, st.integers(1, 12))
def test_bins_hold_everything_once_under_the_cap(tokens, num_bins):
    bins = into_bins([float(t) for t in tokens], tokens, 700, num_bins)
    if bins is not None:
        assert sorted(i for b in bins for i in b) == list(range(len(tokens)))
        assert len(bins) == num_bins
        assert all(sum(tokens[i] for i in b) <= 700 for b in bins)
    else:
        assert num_bins < len(tokens)


@given(ITEMS)
def test_best_fit_decreasing_holds_everything_and_leaves_no_two_half_empty_bins(tokens):
    bins = best_fit_decreasing(tokens, 500)
    assert sorted(i for b in bins for i in b) == list(range(len(tokens)))
    fills = sorted(sum(tokens[i] for i in b) for b in bins)
    assert fills[-1] <= 500
    assert len(fills) < 2 or fills[0] + fills[1] > 500


def test_karmarkar_karp_of_the_textbook_example():
    """Karmarkar and Karp's difference of {8, 7, 6, 5, 4} in two parts is 2: {8, 6} against {7, 5, 4}."""
    parts = karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in p) for p in parts) == [14, 16]


@given(ITEMS, st.integers(1, 6))
def test_karmarkar_karp_holds_everything_once(costs, num_bins):
    parts = karmarkar_karp([float(c) for c in costs], num_bins)
    assert len(parts) == num_bins
    assert sorted(i for p in parts for i in p) == list(range(len(costs)))
