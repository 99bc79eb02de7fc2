"""A plan that runs forward only gives every sequence the losses and logits of a plain forward, and changes nothing."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("pp", "stage", "plans"),
    [
        only_full(1, 0, ["packs", "7", "shared 7"], id="ZeRO 0"),
        pytest.param(1, 3, ["shared 5"], id="ZeRO 3"),
        only_full(1, 3, ["8", "packs", "shared 7"], id="ZeRO 3, slices"),
        pytest.param(2, 1, ["2", "11"], id="a pipeline"),
    ],
)
def test_forwards_alone_give_what_plain_ones_give(on_ranks, pp, stage, plans):
    results = on_ranks(2, "score_jobs.scored", pp=pp, stage=stage, plans=plans)
    for result in results:
        assert not result["changed"]
        for row, first in zip(result["plans"], results[0]["plans"], strict=True):
            assert row["losses"] < 2e-6
            assert row["masked"] < 2e-6
            assert row["vectors"] < 2e-6
            assert row["sparse"] < 2e-6, "blocks of keys left out, at once and as a dense pass has chosen"
            assert row["pairs"] < 1e-12
            assert row["loss"] == first["loss"]
        assert max(row["left out"] for row in result["plans"]) > 1e-4 or plans == ["shared 5"]
        assert max(result["excess"]) < 2e-6, "over the losses of a reference, token by token"
        assert max(row["tokens"] for row in result["plans"]) < 1e-5  # of losses of 5 and more
        assert max(result["trained"]) < 2e-6, "the losses of sequences that are trained on, of the weights before"
    assert all(row["has_all_logits"] for row in results[0]["plans"])
    assert max(row["logits"] for row in results[0]["plans"]) < 2e-6
