"""What the benchmark of garbage makes of its rows."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import evenload
import pytest

SCRIPT = Path(evenload.__file__).parent / "benchmarks" / "training" / "garbage.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("benchmark_of_garbage", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(mode: str, pauses_s: list[float]) -> list[dict[str, Any]]:
    numbered = enumerate(pauses_s, start=1)
    return [
        {"mode": mode, "step": step, "seconds": 0.1 + s, "most_pause_s": s, "pause_s": s, "left": 0.0}
        for step, s in numbered
    ]


def test_one_draw_has_the_mean_and_many_have_the_longest(script: Any) -> None:
    assert script.longest_s([1.0, 2.0, 6.0], 1) == pytest.approx(3.0)
    assert script.longest_s([1.0, 2.0, 6.0], 10_000) == pytest.approx(6.0)
    assert script.longest_s([0.0, 1.0], 2) == pytest.approx(0.75)


def test_many_ranks_pause_one_by_one_in_each_step_and_at_once_in_some(script: Any) -> None:
    pauses_s = [0.0, 0.0, 0.0, 0.008]
    modes = script.summary([*rows("python", pauses_s), *rows("every 4", pauses_s)], num_ranks=2)
    assert modes["python"]["at_1024_s"] == pytest.approx(0.008)
    assert modes["every 4"]["at_1024_s"] == pytest.approx(0.002)
    assert modes["python"]["most_s"] == pytest.approx(0.108)
