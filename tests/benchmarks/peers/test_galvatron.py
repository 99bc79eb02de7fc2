"""The bound on strategies by layer beside all choices there are, and Galvatron's formula of a pipeline."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from evenload.benchmarks.peers import galvatron

LAYERS, STRATEGIES = 4, 3


def drawn(seed: int) -> tuple[Any, Any]:
    """MB and seconds of each strategy [S]; more memory takes less time."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(1, 9, STRATEGIES)), -np.sort(-rng.uniform(1, 9, STRATEGIES))


@pytest.mark.parametrize("seed", range(20))
def test_no_strategies_of_equal_layers_are_below_the_bound_and_some_are_near(seed: int) -> None:
    memory, seconds = drawn(seed)
    budget = 6 + seed
    rows = [list(row) for row in product(range(STRATEGIES), repeat=LAYERS) if memory[list(row)].sum() <= budget]
    bound_s = galvatron.least_by_layer(seconds, memory, LAYERS, budget)
    if not rows:
        assert bound_s == math.inf
        return
    least_s = min(seconds[row].sum() for row in rows)
    # Rounding moves a layer at the most.
    assert least_s - np.ptp(seconds) - 1e-12 <= bound_s <= least_s * (1 + 1e-12)


def test_a_pipeline_of_equal_stages_takes_fill_work_and_drain() -> None:
    def least(*stages: float, chunks: int) -> float:
        return float(galvatron.least_of_stages(np.array(stages), chunks))

    assert least(2.0, chunks=5) == pytest.approx(10.0)
    assert least(1.0, 1.0, 1.0, chunks=4) == pytest.approx(6.0)
    # The gradient sum of the last micro-batch is seen beyond what other stages still do.
    assert galvatron.step_s(np.array([2.0]), np.array([2.5]), 5) == pytest.approx(10.5)
    assert galvatron.step_s(np.array([2.0, 2.0]), np.array([2.5, 2.5]), 5) == pytest.approx(12.5)
    rng = np.random.default_rng(0)
    stages = rng.uniform(1, 3, (50, 4))
    more = stages + rng.uniform(0, 1, stages.shape)
    assert (galvatron.least_of_stages(stages, 6) <= galvatron.least_of_stages(more, 6)).all()


def test_what_stock_trainers_run_is_one_strategy_without_ulysses() -> None:
    def of(tp: int = 1, sp: int = 1, pp: int = 1, kind: str = "ZERO2") -> Any:
        name = type("Kind", (), {"name": kind})
        return type("Strategy", (), {"tp_size": tp, "sp_size": sp, "pp_size": pp, "dp_type": name})

    assert galvatron.stock(of(tp=4, pp=2))
    assert galvatron.stock(of(kind="ZERO3"))
    assert not galvatron.stock(of(sp=2))
    assert not galvatron.stock(of(tp=2, kind="ZERO3"))
