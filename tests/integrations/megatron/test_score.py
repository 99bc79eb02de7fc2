"""A plan that runs forward only gives every sequence the losses and logits of a plain forward, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "packs, slices and shared ones": {"plans": [3, 8, "all_gather", "chain", 101]},
    "tensor parallelism": {"plans": [5, 102], "parallel__tp": 2},
    "a pipeline": {"plans": [6, 9, 103], "parallel__pp": 2},
    "a V": {"plans": [6, 9], "parallel__pp": 2, "plugins__pipeline": {"enabled": True, "v_shape": True}},
    "experts": {"plans": [4, 7], "parallel__ep": 2, "experts": True},
}


@pytest.mark.parametrize("name", CASES)
def test_forwards_alone_give_what_plain_ones_give(on_ranks: Callable[..., list[Any]], name: str) -> None:
    results = on_ranks(4, "scored", **CASES[name])
    for result in results:
        assert not result["changed"]
        for row, first in zip(result["plans"], results[0]["plans"], strict=True):
            assert row["losses"] < 1e-9
            assert row["masked"] < 1e-9
            assert row["vectors"] < 1e-9
            assert row["tokens"] < 1e-9
            assert row["loss"] == first["loss"]
        assert max(result["trained"]) < 1e-9, "the losses of sequences that are trained on, of the weights before"
        assert max(result["sums"]) < 1e-9
        assert max(result["excess"]) < 1e-9, "over the losses of a reference, token by token"
    assert all(row["num_tokens"] == 8 for row in results[0]["plans"])
    assert all(row["num_logits"] == 8 and row["logits"] < 1e-9 for row in results[0]["plans"])


def test_a_slice_whose_loss_counts_twice_is_noticed(on_ranks: Callable[..., list[Any]]) -> None:
    results = on_ranks(4, "scored", plans=[8], mutant="a slice counted twice")
    assert any(row["losses"] > 1e-6 for row in results[0]["plans"])
    assert max(results[0]["trained"]) > 1e-6
