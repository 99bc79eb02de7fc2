"""A plan that runs forward only gives every sequence the losses and logits of a plain forward, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
CASES = {
    "ZeRO 0": (1, 0, ["packs", "7", "shared 7"]),
    "ZeRO 3": (1, 3, ["shared 5"]),
    "ZeRO 3, slices": (1, 3, ["8", "shared 7"]),
    "a pipeline": (2, 1, ["2", "11"]),
}


@pytest.mark.parametrize("name", [only_full("ZeRO 0"), "ZeRO 3", only_full("ZeRO 3, slices"), "a pipeline"])
def test_forwards_alone_give_what_plain_ones_give(on_ranks: Callable[..., list[Any]], name: str) -> None:
    pp, stage, plans = CASES[name]
    results = on_ranks(2, "score_jobs.scored", pp=pp, stage=stage, plans=plans)
    for result in results:
        assert not result["changed"]
        for row, first in zip(result["plans"], results[0]["plans"], strict=True):
            assert row["losses"] < 2e-6
            assert row["masked"] < 2e-6
            assert row["vectors"] < 2e-6
            assert row["loss"] == first["loss"]
        assert max(result["excess"]) < 2e-6, "over the losses of a reference, token by token"
        assert max(row["tokens"] for row in result["plans"]) < 1e-5  # of losses of 5 and more
        assert max(result["trained"]) < 2e-6, "the losses of sequences that are trained on, of the weights before"
    assert all(row["has_all_logits"] for row in results[0]["plans"])
    assert max(row["logits"] for row in results[0]["plans"]) < 2e-6
