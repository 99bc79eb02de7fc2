"""Planned, packed steps against plain training of the same weights, on the real Megatron-Core."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from harness.proof import caught
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

TP2, PP2 = {"parallel__tp": 2}, {"parallel__pp": 2}
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {}, id="dp2"),
    pytest.param(2, TP2, id="tp2"),
    pytest.param(2, PP2, id="pp2"),
    pytest.param(4, {**TP2, **PP2}, id="tp2pp2"),
    pytest.param(4, TP2, id="dp2tp2"),
    only_full(4, PP2, id="dp2pp2"),
]
IDLE = [[0, [2, 1]], [0, [0, 3, 6]], [0, [4, 5, 7]]]
DUMMY = [*IDLE, [1, []], [1, []]]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_float64_gradients_are_those_of_plain_training(on_ranks, size, layout):
    results = on_ranks(size, "proven", **layout)
    exact(results, layout)
    names = {name for (found,) in results for name in found["names"]}
    assert {f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in range(4)} < names
    assert {"embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"} < names


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3"])
def test_every_family(on_ranks, family):
    exact(on_ranks(2, "proven", model__family=family, **TP2), TP2)


@pytest.mark.parametrize(
    ("size", "layout"),
    [pytest.param(2, PP2, id="pp2"), only_full(4, {**TP2, **PP2}, id="tp2pp2"), only_full(2, {}, id="dp2")],
)
def test_a_tied_embedding_gets_the_gradients_of_both_ends(on_ranks, size, layout):
    results = on_ranks(size, "proven", model__tied_embeddings=True, model__head_dim=12, **layout)
    exact(results, layout)
    assert not any("output_layer.weight" in found["names"] for (found,) in results)


@pytest.mark.parametrize(
    ("size", "plans", "layout"),
    [
        pytest.param(2, [DUMMY, "packs, padded"], {}, id="rank of dummies, and padding"),
        pytest.param(2, [IDLE, DUMMY], {"megatron__overlap_grad_reduce": True}, id="overlap"),
        pytest.param(4, [IDLE, DUMMY], PP2, id="a pipeline"),
    ],
)
def test_ranks_without_data_and_padded_plans_take_the_same_path(on_ranks, size, plans, layout):
    exact(on_ranks(size, "proven", plans=plans, **layout), layout)


@pytest.mark.parametrize(
    ("dtype", "bound", "layout"),
    [
        pytest.param("fp32", 2e-6, TP2, id="fp32-tp2"),
        pytest.param("bf16", 0.03, PP2, id="bf16-pp2"),
        pytest.param("bf16", 0.03, {}, id="bf16-dp2"),
        only_full("fp32", 2e-6, PP2, id="fp32-pp2"),
        only_full("fp32", 2e-6, {}, id="fp32-dp2"),
        only_full("bf16", 0.03, TP2, id="bf16-tp2"),
    ],
)
def test_training_dtypes_are_right_to_their_rounding(on_ranks, dtype, bound, layout):
    for (found,) in on_ranks(2, "proven", train__dtype=dtype, **layout):
        assert found["grad"] < bound


@pytest.mark.parametrize("mutant", ["restarted position", "moved border", "dropped token", "wrong scale"])
def test_the_proof_catches_planted_faults(on_ranks, mutant):
    assert caught(on_ranks(2, "proven", mutant=mutant))


@pytest.mark.parametrize(
    ("size", "by_plan"),
    [
        pytest.param(1, False, id="one-recipe"),
        pytest.param(2, True, id="pp2-plan"),
        only_full(1, True, id="one-plan"),
        only_full(2, False, id="pp2-recipe"),
    ],
)
def test_recomputation_replays_under_its_own_plan(on_ranks, size, by_plan):
    assert max(on_ranks(size, "recomputed", by_plan=by_plan)) < 1e-9


def test_the_pieces_work_in_a_loop_of_ones_own(on_ranks):
    assert max(on_ranks(2, "own_loop")) < 2e-6


def test_all_groups_have_the_time_limit_of_the_job(on_ranks):
    for limit_s, *others in on_ranks(2, "time_limits"):
        assert set(others) == {limit_s}


def test_busy_time_leaves_loading_out(on_ranks):
    for parts in on_ranks(2, "measured_parts"):
        assert 0 < parts["busy"] <= parts["all"] - parts["paused"]
