"""The integer polish: never worse, bounded by nodes, and a clear word where its solver is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from evenload.core.balance.level import loads
from evenload.core.errors import EvenloadError
from evenload.plugins.packing.polish import polish


def uneven(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    weights = random.lognormal(0, 1, (1, 24))
    capacity = np.full((1, 4), weights.sum() / 4)
    return weights, capacity, np.zeros_like(capacity), random.integers(0, 4, 24)


def fullest(weights: np.ndarray, capacity: np.ndarray, base: np.ndarray, bins: np.ndarray) -> float:
    return float(((base + loads(weights, capacity.shape[1], bins)) / capacity).max())


@pytest.mark.parametrize("seed", range(3))
def test_polishing_evens_what_was_thrown_together(seed: int) -> None:
    weights, capacity, base, bins = uneven(seed)
    found = polish(weights, capacity, base, bins, nodes=50)
    assert fullest(weights, capacity, base, found) < 1.05 < fullest(weights, capacity, base, bins)
    assert (polish(weights, capacity, base, bins, nodes=50) == found).all()


def test_what_is_even_stays_as_it_is() -> None:
    weights, capacity = np.ones((2, 8)), np.full((2, 4), 2.0)
    bins = np.arange(8) % 4
    assert (polish(weights, capacity, np.zeros((2, 4)), bins, nodes=10) == bins).all()


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.raises(EvenloadError, match=r"evenload\[solver\]"):
        polish(*uneven(0), nodes=10)
