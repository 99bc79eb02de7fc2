"""The memory benchmark on a sequence that takes seconds: the ratios do not depend on its length."""

from __future__ import annotations

import pytest

SCRIPT = ("memory/memory.py", "--tokens", "1024")


def test_slices_hold_a_fraction_at_equal_gradients(benchmark):
    result = benchmark(*SCRIPT)
    rows = {r["variant"]: r for r in result["rows"]}
    assert list(rows) == ["whole", "recomputed", "sliced", "sliced, replayed"]
    assert all(row["grad_rel_err"] < 1e-5 and row["loss_rel_err"] < 1e-6 for row in rows.values())
    assert result["whole_over_replayed"] == rows["whole"]["peak_bytes"] / rows["sliced, replayed"]["peak_bytes"]
    assert result["whole_over_replayed"] > 4
    assert result["recomputed_over_replayed"] > 1
    # Slices that all wait for their backward hold what the whole sequence does, and its keys and values once more.
    assert rows["sliced"]["peak_bytes"] > 0.8 * rows["whole"]["peak_bytes"]
    for row in rows.values():
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.06), row["variant"]


def test_more_slices_kept_hold_more(benchmark):
    result = benchmark(*SCRIPT, "--slices", "8", "--keep", "4", "--dtype", "fp64")
    rows = {r["variant"]: r for r in result["rows"]}
    assert 0.4 < rows["sliced, replayed"]["peak_bytes"] / rows["sliced"]["peak_bytes"] < 0.7
    assert max(row["grad_rel_err"] for row in rows.values()) < 1e-9
