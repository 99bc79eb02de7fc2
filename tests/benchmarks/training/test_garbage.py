"""What the benchmark of garbage makes of its rows."""

from __future__ import annotations

from typing import Any

import pytest
from evenload.benchmarks.training import garbage


def rows(mode: str, pauses_s: list[float]) -> list[dict[str, Any]]:
    numbered = enumerate(pauses_s, start=1)
    return [
        {"mode": mode, "step": step, "seconds": 0.1 + s, "most_pause_s": s, "pause_s": s, "left": 0.0}
        for step, s in numbered
    ]


def test_one_draw_has_the_mean_and_many_have_the_longest() -> None:
    assert garbage.longest_s([1.0, 2.0, 6.0], 1) == pytest.approx(3.0)
    assert garbage.longest_s([1.0, 2.0, 6.0], 10_000) == pytest.approx(6.0)
    assert garbage.longest_s([0.0, 1.0], 2) == pytest.approx(0.75)


def test_many_ranks_pause_one_by_one_in_each_step_and_at_once_in_some() -> None:
    pauses_s = [0.0, 0.0, 0.0, 0.008]
    modes = garbage.summary([*rows("python", pauses_s), *rows("every 4", pauses_s)], num_ranks=2)
    assert modes["python"]["at_1024_s"] == pytest.approx(0.008)
    assert modes["every 4"]["at_1024_s"] == pytest.approx(0.002)
    assert modes["python"]["most_s"] == pytest.approx(0.108)
