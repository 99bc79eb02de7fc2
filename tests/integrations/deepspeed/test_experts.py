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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_bit_equal_and_goes_on_on_other_ranks(on_ranks, tmp_path, stage):
    went_on = on_ranks(2, "rank_experts.save_and_go_on", stage=stage, ep=2, folder=str(tmp_path))
    assert on_ranks(2, "rank_experts.resume", stage=stage, ep=2, folder=str(tmp_path)) == went_on
    for ep in (2, 4):
        more = on_ranks(4, "rank_experts.resume", stage=stage, ep=ep, folder=str(tmp_path))
        if stage == 0 and ep == 4:
            assert all("another ep\n  found: 2 there, 4 in this recipe" in told for (told,) in more)
            continue
        for wanted, found in zip(went_on[0], more[0], strict=True):
            assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-6)


@pytest.mark.parametrize(("stage", "ranks", "ep"), [(0, 2, 2), (2, 4, 2), (3, 2, 2)])
def test_a_loop_of_others_takes_exact_steps(on_ranks, stage, ranks, ep):
    for result in on_ranks(ranks, "rank_experts.unmodified", stage=stage, ep=ep):
        assert result["named"]
        assert result["error"] <= 1e-5
