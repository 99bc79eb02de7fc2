"""What the benchmark of mixtures measures of draws."""

from __future__ import annotations

import pytest
from evenload.benchmarks.training import mixture


@pytest.mark.slow
def test_one_order_and_mixtures_of_many_have_a_row_each(monkeypatch):
    monkeypatch.setattr(mixture, "SAMPLES", 2000)
    rows = mixture.drawn()
    assert [row["domains"] for row in rows] == [0, *mixture.DOMAINS]
    assert all(row["us"] > 0 for row in rows)
    losses = {"step_s": {"with": 1.0, "without": 1.0}, "over": {"median": 1.0, "interval": None}}
    assert mixture.table({"draw": rows, "losses": losses}).row_count == len(rows)
