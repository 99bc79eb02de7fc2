"""What stands in for Galvatron's compiled loop, and the bound on strategies by layer: beside all choices there are."""

from __future__ import annotations

import math
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import evenload
import numpy as np
import pytest

SCRIPT = Path(evenload.__file__).parent / "benchmarks" / "published" / "galvatron.py"
LAYERS, STRATEGIES = 4, 3


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("benchmark_of_galvatron", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(seed: int, *, equal: bool = False) -> tuple[Any, Any, Any]:
    """MB [L, S], seconds [L, S] and seconds of a switch [L, S, S]; more memory takes less time."""
    rng = np.random.default_rng(seed)
    rows = 1 if equal else LAYERS
    memory = np.sort(rng.integers(1, 9, (rows, STRATEGIES)).astype(np.int32), axis=1)
    inside = -np.sort(-rng.uniform(1, 9, (rows, STRATEGIES)), axis=1)
    between = rng.uniform(0, 1, (LAYERS, STRATEGIES, STRATEGIES))
    between[0] = 0.0
    return np.tile(memory, (LAYERS // rows, 1)), np.tile(inside, (LAYERS // rows, 1)), between


def choices(memory: Any, inside: Any, between: Any, room: int) -> dict[tuple[int, ...], float]:
    """Seconds of all strategies of layers that fit."""
    out = {}
    for row in product(range(STRATEGIES), repeat=LAYERS):
        if sum(memory[i, s] for i, s in enumerate(row)) <= room:
            switches = sum(between[i, row[i - 1], row[i]] for i in range(1, LAYERS))
            out[row] = sum(inside[i, s] for i, s in enumerate(row)) + switches
    return out


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("other", [0, 3])
def test_the_loop_finds_what_the_best_of_all_choices_is(script: Any, seed: int, other: int) -> None:
    memory, inside, between = drawn(seed)
    room = 8 + seed
    all_of_them = choices(memory, inside, between, room - other)
    chosen = {1: np.full(LAYERS, -1, dtype=np.int32)}
    asked = memory, None, None, between, inside, {1: other}, {1: 0.5}, chosen
    cost_s, left = script.core().dynamic_programming_core(LAYERS, room + 1, STRATEGIES, *asked)
    if not all_of_them:
        assert (cost_s[1], left[1]) == (math.inf, -1)
        return
    assert cost_s[1] == pytest.approx(min(all_of_them.values()) + 0.5, rel=1e-12)
    row = tuple(chosen[1].tolist())
    assert all_of_them[row] == pytest.approx(min(all_of_them.values()), rel=1e-12)
    assert left[1] == room - other - sum(memory[i, s] for i, s in enumerate(row))


@pytest.mark.parametrize("seed", range(20))
def test_no_strategies_of_equal_layers_are_below_the_bound_and_some_are_near(script: Any, seed: int) -> None:
    memory, inside, _ = drawn(seed, equal=True)
    room, free = 6 + seed, np.zeros((LAYERS, STRATEGIES, STRATEGIES))
    all_of_them = choices(memory, inside, free, room)
    bound_s = script.least_by_layer(inside[0], memory[0], LAYERS, room)
    if not all_of_them:
        assert bound_s == math.inf
        return
    least_s = min(all_of_them.values())
    assert bound_s <= least_s * (1 + 1e-12)
    # Rounding moves a layer at the most.
    assert bound_s >= least_s - (inside[0].max() - inside[0].min()) - 1e-12
    one = min(sum(inside[:, s]) for s in range(STRATEGIES) if LAYERS * memory[0, s] <= room)
    assert bound_s <= one * (1 + 1e-12)


def test_a_pipeline_of_equal_stages_takes_fill_work_and_drain(script: Any) -> None:
    def least(*stages: float, chunks: int) -> float:
        return float(script.least_of_stages(np.array(stages), chunks))

    assert least(2.0, chunks=5) == pytest.approx(10.0)
    assert least(1.0, 1.0, 1.0, chunks=4) == pytest.approx(6.0)
    # The gradient sum of the last micro-batch is seen beyond what other stages still do.
    assert script.step_s(np.array([2.0]), np.array([2.5]), 5) == pytest.approx(10.5)
    assert script.step_s(np.array([2.0, 2.0]), np.array([2.5, 2.5]), 5) == pytest.approx(12.5)
    rng = np.random.default_rng(0)
    stages = rng.uniform(1, 3, (50, 4))
    more = stages + rng.uniform(0, 1, stages.shape)
    assert (script.least_of_stages(stages, 6) <= script.least_of_stages(more, 6)).all()


def test_what_stock_trainers_run_is_one_strategy_without_ulysses(script: Any) -> None:
    def of(tp: int = 1, sp: int = 1, pp: int = 1, kind: str = "ZERO2") -> Any:
        name = type("Kind", (), {"name": kind})
        return type("Strategy", (), {"tp_size": tp, "sp_size": sp, "pp_size": pp, "dp_type": name})

    assert script.stock(of(tp=4, pp=2))
    assert script.stock(of(kind="ZERO3"))
    assert not script.stock(of(sp=2))
    assert not script.stock(of(tp=2, kind="ZERO3"))
    assert script.CORE not in sys.modules
