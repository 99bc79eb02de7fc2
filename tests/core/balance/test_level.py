"""Filling unlike bins evenly: against exact solutions of small cases, and laws by hypothesis."""

import numpy as np
import pulp
import pytest
from evenload.core.balance.level import level, loads
from hypothesis import given
from hypothesis import strategies as st


def exact(weights, capacity):
    """Least possible fill of the fullest bin (PuLP, HiGHS), evaluated from the assignment and not from the status."""
    items, bins = range(weights.shape[1]), range(capacity.shape[1])
    problem = pulp.LpProblem("bins", pulp.LpMinimize)
    fill = pulp.LpVariable("fill", 0)
    put = pulp.LpVariable.dicts("put", (items, bins), cat="Binary")
    problem += fill
    for i in items:
        problem += pulp.lpSum(put[i][b] for b in bins) == 1
    for b in bins:
        for row, room in zip(weights, capacity, strict=True):
            problem += pulp.lpSum(row[i] * put[i][b] for i in items) <= float(room[b]) * fill
    problem.solve(pulp.HiGHS(msg=False))
    chosen = np.array([max(bins, key=lambda b: put[i][b].value()) for i in items])
    return fill_of(weights, capacity, chosen)


def fill_of(weights, capacity, bins):
    return float((loads(weights, capacity.shape[1], bins) / capacity).max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("directions", [1, 2])
def test_within_five_per_cent_of_the_exact_fill(seed, directions):
    random = np.random.default_rng(seed)
    weights = random.lognormal(0, 1, (1, 14)) * random.uniform(0.9, 1.1, (directions, 14))
    capacity = np.tile([1.0, 1.0, 2.0], (directions, 1)) * weights.sum(axis=1, keepdims=True) / 4
    found = level(weights, capacity, np.zeros_like(capacity))
    assert fill_of(weights, capacity, found) <= 1.05 * exact(weights, capacity)


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 9), st.integers(1, 2))
def test_polishing_never_loses_to_longest_first_and_repeats_itself(seed, items, bins, rows):
    random = np.random.default_rng(seed)
    weights = random.lognormal(0, 1.5, (rows, items))
    capacity = random.integers(1, 5, bins) * weights.mean() * np.ones((rows, 1))
    base = capacity * random.uniform(0, 0.5, bins)
    found = level(weights, capacity, base)
    assert (found == level(weights, capacity, base)).all()
    assert found.min() >= 0
    assert found.max() < bins
    fill = float(((base + loads(weights, bins, found)) / capacity).max())
    load = base.copy()
    for item in np.argsort(-weights.max(axis=0), kind="stable"):
        b = int(((load + weights[:, item, None]) / capacity).max(axis=0).argmin())
        load[:, b] += weights[:, item]
    assert fill <= float((load / capacity).max()) * (1 + 1e-9) or items > 4 * bins
