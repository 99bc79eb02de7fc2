"""The benchmark of even padded groups in quick mode: its own search of all cuts agrees with the planner."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_plans_are_over_their_bounds_and_near_the_best(benchmark):
    result = benchmark("planning/padded.py", "--quick")
    small, large = result["rows"]
    assert 1.0 - 1e-9 <= small["best"][0] <= small["best"][1] < 1.05
    for row in (small, large):
        assert row["bound"][0] >= 1.0 - 1e-9
        assert all(row[name][0] >= 1.0 - 1e-9 for name in ("group_by_length", "token_budget", "stock"))
