"""Gradients of samples from one backward of packs are those of one backward a sample, under every stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROUNDING = 2e-6
CHAINS = ["chains none", "chains some", "random 2"]
EQUAL = ["chains none equal", "chains some equal", "random 2"]
CASES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0, "names": CHAINS},
    "ZeRO 1": {"stage": 1, "names": CHAINS, "recompute": True},
    "ZeRO 2": {"stage": 2, "names": CHAINS},
    "ZeRO 3": {"stage": 3, "names": EQUAL},
    "ZeRO 3, recomputed": {"stage": 3, "names": EQUAL, "recompute": True},
    "stages": {"stage": 1, "names": ["whole", "1", "2"], "pp": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_one_backward_a_sample(on_ranks: Callable[..., list[Any]], name: str) -> None:
    case = CASES[name]
    for result in on_ranks(2, "rank_gradients.by_sample", **case):
        assert result["changed"] == []
        assert result["gathered"] == 0
        for plan in case["names"]:
            assert result[plan]["rows"] < ROUNDING, plan
            assert result[plan]["backward"] < ROUNDING, plan
            assert result[plan]["forwards"] < 1e-3, plan
            assert result[plan]["ranks"] >= 0.999, plan
