"""The benchmark of tenants in shared steps, on few draws."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


def test_company_pays_most_where_tenants_are_small(ran, tmp_path):
    sizes = ("--samples", "2,16", "--ranks", "2", "--draws", "4", "--out", "tenants.json")
    assert "predicted" in ran("planning/tenants.py", *sizes, folder=tmp_path).stdout
    result = json.loads((tmp_path / "tenants.json").read_text())
    rows = {(r["planner"], r["lengths"], r["costs"], r["samples"]): r for r in result["rows"]}
    assert len(rows) == len(result["rows"]) == 6 * 2
    for row in rows.values():
        assert row["saving"] == pytest.approx(row["one_after_another_s"] / row["together_s"])
        assert row["saving"] >= 1.0 - 1e-3
        assert row["saving_at_most"] is None or row["saving"] <= row["saving_at_most"] * (1 + 1e-9)
    few, many = (rows["packing", "short", "frozen", samples]["saving"] for samples in (2, 16))
    assert few > 1.2 > many
    frozen, whole = (rows["packing", "short", costs, 16] for costs in ("frozen", "whole"))
    assert frozen["together_s"] < whole["together_s"]
