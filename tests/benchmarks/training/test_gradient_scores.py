"""The benchmark of gradients of samples, on few samples of a small model."""

from __future__ import annotations

import pytest

FEW = ("--hidden", "16", "--layers", "1", "--samples", "3", "--batches", "1", "--columns", "64")


@pytest.mark.slow
def test_packs_and_single_passes_give_the_same_rows(benchmark):
    told = benchmark("training/gradient_scores.py", *FEW)
    assert set(told["lengths"]) == {"16 to 128", "128 to 1,024"}
    for row in told["lengths"].values():
        assert row["off"] < 1e-4
        assert row["losses_off"] < 1e-4
        assert row["scoring"] > 0
        assert row["gradients"] > 0
        assert row["projected"] > 0
