"""The pipeline benchmark in quick mode: every way is there, and chunks of equal time are ahead of all others."""

from __future__ import annotations

import pytest
from harness.cases import full


@full
@pytest.mark.slow
def test_chunks_of_equal_time_are_ahead_of_every_other_way(benchmark):
    result = benchmark("planning/pipeline.py", "--quick")
    assert result["predicted"] is True
    rows = {row["way"]: row for row in result["rows"]}
    assert set(rows) == {"evenload", "no W", "algorithm 1", "fixed", "whole", "packed", "balanced"}
    ours = rows["evenload"]
    assert ours["bubble_frac"] < 0.08
    assert ours["micro_batch_imbalance"] < 1.3
    assert ours["step_s"] <= rows["no W"]["step_s"] * 1.005
    assert ours["step_s"] <= rows["algorithm 1"]["step_s"] * 1.001
    assert ours["step_s"] <= rows["fixed"]["step_s"] / 1.06
    assert all(ours["step_s"] <= rows[way]["step_s"] / 1.3 for way in ("whole", "packed", "balanced"))
    for row in rows.values():
        assert row["fits"]
        assert 0 < row["peak_bytes"] <= 0.9 * 8e10 * (1 + 1e-9)
        # Stages work, exchange, or wait; nothing is faster than the work of a mean stage.
        assert row["of_ideal"] <= 1
        busy_frac = 1 - row["bubble_frac"] - row["exposed_frac"]
        assert row["of_ideal"] <= busy_frac + row["exposed_frac"] + 1e-9
