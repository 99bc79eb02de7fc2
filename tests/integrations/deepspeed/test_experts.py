"""Experts under DeepSpeed against plain training with all of them on every rank; 2 and 4 gloo ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

ROUNDING = 2e-6


def _check(results, names):
    for result in results:
        for name in names:
            worst = max(result[name][key] for key in ("grad", "loss", "norm"))
            assert worst <= ROUNDING, (name, result[name])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_of_transformers_are_exact(on_ranks, stage):
    names = ["whole_sequences", "chains some", "regrouped", "random 3"]
    _check(on_ranks(2, "rank_experts.exactness", stage=stage, names=names), names)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_divided_experts_are_exact(on_ranks, stage):
    names = ["whole_sequences", "chains some", "regrouped", "random 3"]
    _check(on_ranks(2, "rank_experts.exactness", stage=stage, names=names, ep=2), names)
