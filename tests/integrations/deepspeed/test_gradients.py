"""Gradients of samples from one backward of packs are those of one backward a sample, under every stage of ZeRO."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from harness.proof import ROUNDING

pytestmark = pytest.mark.slow
CHAINS = ["slices", "slices, half replayed", "2"]
EQUAL = ["slices, in step", "slices, in step, half replayed", "2"]


@pytest.mark.parametrize(
    "asked",
    [
        only_full({"stage": 0, "names": CHAINS}, id="ZeRO 0"),
        only_full({"stage": 1, "names": CHAINS, "recompute": True}, id="ZeRO 1, recomputed"),
        only_full({"stage": 2, "names": ["5", "slices, half replayed"]}, id="ZeRO 2"),
        only_full({"stage": 3, "names": EQUAL}, id="ZeRO 3"),
        pytest.param({"stage": 3, "names": ["5"], "recompute": True}, id="ZeRO 3, recomputed"),
        only_full({"stage": 3, "names": EQUAL, "recompute": True}, id="ZeRO 3, recomputed, slices"),
        pytest.param({"stage": 1, "names": ["2"], "pp": 2}, id="stages"),
    ],
)
def test_rows_are_those_of_one_backward_a_sample(on_ranks, asked):
    for result in on_ranks(2, "gradient_jobs.by_sample", **asked):
        assert result["changed"] == []
        assert result["gathered"] == 0
        for plan in asked["names"]:
            assert result[plan]["rows"] < ROUNDING, plan
            assert result[plan]["backward"] < ROUNDING, plan
            assert result[plan]["forwards"] < 1e-3, plan
            assert result[plan]["ranks"] >= 0.999, plan
