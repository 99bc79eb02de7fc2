"""Planned steps on the real DeepSpeed engine against plain training of the same weights; 2 gloo ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

LENGTHS = (40, 9, 13, 22, 5, 17)
STAGES = (0, 1, 2, 3)
PLANS = ("unequal counts", "padded", "idle rank", "forwards first")
ROUNDING = 2e-6


def _check(results, tolerance):
    for result in results:
        assert result["moved"] == 0
        for name in PLANS:
            plan = result["plans"][name]
            assert plan["grad"] <= tolerance, name
            assert plan["loss"] <= tolerance, name
            assert plan["norm"] <= tolerance, name
            assert plan["miscounted"] == 0
            assert plan["busy"] > 0
    for name in PLANS:
        ran = sorted(piece for result in results for piece in result["plans"][name]["executed"])
        assert ran == [(i, 0, n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_of_plain_training(on_ranks, stage):
    results = on_ranks(2, "exactness", stage=stage)
    _check(results, ROUNDING)
    assert results[0]["describe"]["zero_stage"] == stage
    assert results[0]["describe"]["parameters"] == results[1]["describe"]["parameters"] > 10_000


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3"])
def test_every_family(on_ranks, family):
    _check(on_ranks(2, "exactness", stage=2, family=family), ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_within_its_rounding(on_ranks, stage):
    _check(on_ranks(2, "exactness", stage=stage, dtype="bf16"), 3e-2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_mutants_are_caught(on_ranks, stage):
    for errors in on_ranks(2, "mutants", stage=stage):
        sound = {name: error for name, error in errors.items() if name.startswith("none")}
        assert all(error <= ROUNDING for error in sound.values()), sound
        broken = {name: error for name, error in errors.items() if name not in sound}
        assert len(broken) == (5 if stage == 3 else 4)
        assert all(error > 1e-3 for error in broken.values()), broken


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_every_stage_and_plan_trains_alike(on_ranks, clip_grad):
    runs = [
        on_ranks(2, "training", stage=stage, dtype="fp32", clip_grad=clip_grad, plan=plan)
        for stage, plan in zip(STAGES, PLANS, strict=True)
    ]
    for ranks in runs:
        assert ranks[0] == ranks[1]
        for (loss, norm), (first_loss, first_norm) in zip(ranks[0], runs[0][0], strict=True):
            assert loss == pytest.approx(first_loss, rel=2e-5)
            assert norm == pytest.approx(first_norm, rel=2e-4)
    losses = [loss for loss, _ in runs[0][0]]
    assert losses == sorted(losses, reverse=True)


def test_what_the_engine_cannot_run_is_refused_on_every_rank(on_ranks):
    for told in on_ranks(2, "refused_plans"):
        wanted = ["4 ranks", "names no cp_comm", "2 stages"]
        assert len(told) == len(wanted)
        for text, part in zip(told, wanted, strict=True):
            assert part in text
