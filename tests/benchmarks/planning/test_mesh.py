"""The mesh benchmark in quick mode: every way is there, and none is below its bound."""

from __future__ import annotations

import pytest
from harness.cases import full


@full
@pytest.mark.slow
def test_every_way_is_above_its_bound_and_mixing_degrees_pays(benchmark):
    result = benchmark("planning/mesh.py", "--quick")
    assert result["predicted"] is True
    (row,) = result["batches"]
    assert row["SP64"] >= row["BatchAda"] >= row["each"] > row["bound"]
    assert row["each"] * (1 + 1e-9) >= row["groups"] >= row["groups_bound"]
    assert row["SP64"] / 1.5 > row["evenload"] >= row["bound"] * (1 - 1e-9)
    assert row["imbalance"] <= 1.15
    (row,) = result["megatron"]
    assert row["our_imbalance"] <= 1.15 < row["their_imbalance"]
    assert row["launches"] > 1
    assert [r["over_bound"] >= 1 - 1e-9 for r in result["large"]] == [True, True]
