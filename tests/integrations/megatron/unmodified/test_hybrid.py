"""Megatron-Core's hybrid model in a user's loop: the gradients of the same loop with nothing switched on."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.exact import as_stock
from megatron_tests.settings import WITHOUT_LOSSES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, {"hybrid": "*-*-", "seeds": [1, 2, 3]}, id="one"),
        only_full(2, {"hybrid": "*-*-", "overlap": True}, id="dp2"),
        pytest.param(2, {"hybrid": "**--", "tp": 2}, id="tp2"),
        only_full(4, {"hybrid": "**--", "pp": 2, "overlap": True}, id="dp2pp2, a stage without attention"),
        pytest.param(2, {"hybrid": "*E-*E-", "ep": 2, **WITHOUT_LOSSES}, id="ep2"),
    ],
)
def test_random_plans_give_the_gradients_of_the_stock_loop(on_ranks, size, layout):
    as_stock(on_ranks(size, "user_plans", **{"seeds": [1], **layout}), ("cut", "recomputed", "replayed"))


def test_gradients_are_those_of_context_parallelism(on_ranks):
    for rank in on_ranks(2, "in_context", plugins=[PACKS], hybrid="*-*-", cp=2):
        for result in rank:
            assert result["grad"] < 1e-9, result
            assert result["reports"] < 1e-12


def test_the_layers_that_a_plan_recomputes_run_twice(on_ranks):
    assert on_ranks(1, "forwards_of_layers", layers=2, hybrid="*-*-") == [[2, 2, 1, 1]]


def test_planners_are_told_the_mean_of_the_layers(on_ranks):
    shape, why = on_ranks(1, "sizes_and_order", hybrid="*-*E*E", **WITHOUT_LOSSES)[0]
    # Half of the layers have attention (32 queries, 16 keys); of four without experts one has an MLP of 128.
    assert shape == (6, 32, 32, 16, 8, (3, 5))
    assert not why


MAMBA = {"hybrid": "M-M*"}
PACKS = {"packing": {"enabled": True, "max_tokens": 64}}
ORDERS = {"pipeline": {"enabled": True, "activation_gib": 6e-4}}
COPIES = {"moe": {"enabled": True, "tolerance": 1.0}}


def test_samples_of_mamba_layers_stay_in_their_micro_batches(on_ranks):
    cases = [(PACKS, MAMBA), (ORDERS, {**MAMBA, "pp": 2}), (COPIES, {"hybrid": "MEME", "ep": 2, **WITHOUT_LOSSES})]
    for rank in on_ranks(2, "kept_together", cases=cases):
        for found in rank:
            assert max(found["grad"], found["again"], found["reports"]) < 1e-9, found
            assert found["shapes"]
        alone, ordered, copied = rank
        assert ordered["ordered"]
        assert copied["copies"] > 0
        assert not ordered["idle"]
        assert not copied["idle"]
        assert alone["plans"] == 0
    said = on_ranks(1, "kept_together", cases=cases[:1])[0][0]["idle"]
    assert "layers M of the pattern M-M* keep of earlier tokens" in said[0]


def test_what_hybrid_models_cannot_have_is_refused_by_name(on_ranks):
    (said,) = on_ranks(1, "refused_hybrids", hybrid="*-*-")
    assert "virtual_pipeline_model_parallel_size 2" in said["virtual"]
    assert "attention is not known to keep packed samples apart" in said["stranger"]
    assert "Identity" in said["stranger"]
