"""Where no packs run: gradients of padded groups are the stock Trainer's, or the script runs as it is."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from variant_checks import check_exact

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE, SINGLE = 1e-9, 2e-6


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float64", ["gemma2", "gpt_oss", "mamba", "t5"]),
        ("float32", ["mistral"]),
        only_full("float64", ["gemma3_text", "mistral"]),
        only_full("float32", ["gemma3_text", "gemma2", "gpt_oss", "mamba", "t5"]),
    ],
    ids=str,
)
def test_padded_groups_are_exact_in_double_and_single_precision(on_ranks, dtype, names):
    of_ranks = on_ranks(2, "rank_rows.errors", names=names, dtype=dtype, no_packs=True)
    check_exact(of_ranks, DOUBLE if dtype == "float64" else SINGLE, padded=[True])
    assert all(one["slots"] < 0.95 * one["stock_slots"] for found in of_ranks for one in found.values()), of_ranks


@pytest.mark.parametrize("more", [{"lora": True}, {"left": True}], ids=lambda more: next(iter(more)))
def test_adapters_and_left_padding_are_exact_too(on_ranks, more):
    check_exact(on_ranks(2, "rank_rows.errors", names=["mistral"], no_packs=True, **more), DOUBLE, padded=[True])


def test_dropout_of_attention_is_planned_by_its_law_and_a_mean_of_means_stays(on_ranks):
    for found in on_ranks(2, "rank_rows.errors", names=["gpt2", "t5"], mean=True):
        assert found["gpt2"]["padded"] == [True]
        assert found["t5"]["padded"] == []
        assert "another divisor" in found["t5"]["idle"][0]
        assert found["t5"]["grad"] == 0.0
