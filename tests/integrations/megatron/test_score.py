"""A plan that runs forward only gives every sequence the losses and logits of a plain forward, and changes nothing."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
V = {"parallel__pp": 2, "plugins__pipeline": {"enabled": True, "v_shape": True}}
CASES = {
    "packs, slices and shared ones": ({}, [2, "pairs"], [3, "all_gather", "chain", "shared 101"]),
    "tensor parallelism": ({"parallel__tp": 2}, [11], [5, "shared 102"]),
    "a pipeline": ({"parallel__pp": 2}, [0], [6, 9, "shared 103"]),
    "a V": (V, [0], [6, 9]),
    "experts": ({"parallel__ep": 2, "experts": True}, [5], [4, 7]),
}
"""Changes of the recipe, plans of every change on two ranks, and those of the full run on four."""


@pytest.mark.parametrize(
    ("size", "changes", "plans"),
    [
        *(pytest.param(2, changes, plans, id=name) for name, (changes, plans, _) in CASES.items()),
        *(only_full(4, changes, more, id=f"{name}, more") for name, (changes, _, more) in CASES.items()),
    ],
)
def test_forwards_alone_give_what_plain_ones_give(on_ranks, size, changes, plans):
    results = on_ranks(size, "scored", plans=plans, **changes)
    for result in results:
        assert not result["changed"]
        for row, first in zip(result["plans"], results[0]["plans"], strict=True):
            assert row["losses"] < 1e-9
            assert row["masked"] < 1e-9
            assert row["vectors"] < 1e-9
            assert row["tokens"] < 1e-9
            assert row["sparse"] < 1e-9, "blocks of keys left out, at once and as a dense pass has chosen"
            assert row["pairs"] < 1e-12
            assert row["loss"] == first["loss"]
        assert max(result["trained"]) < 1e-9, "the losses of sequences that are trained on, of the weights before"
        assert max(result["sums"]) < 1e-9
        assert max(row["left out"] for row in result["plans"]) > 1e-4
        assert max(result["excess"]) < 1e-9, "over the losses of a reference, token by token"
    assert all(row["num_tokens"] == 8 for row in results[0]["plans"])
    assert all(row["num_logits"] == 8 and row["logits"] < 1e-9 for row in results[0]["plans"])


def test_a_slice_whose_loss_counts_twice_is_noticed(on_ranks):
    results = on_ranks(2, "scored", plans=[2], mutant="a slice counted twice")
    assert any(row["losses"] > 1e-6 for row in results[0]["plans"])
    assert max(results[0]["trained"]) > 1e-6
