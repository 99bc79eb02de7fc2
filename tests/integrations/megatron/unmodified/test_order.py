"""Orders of plans in a user's own Megatron loop: the gradients of the same loop with nothing switched on."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.exact import as_stock
from megatron_tests.settings import ROUTER_LOSSES, SHARES, WITHOUT_LOSSES

pytestmark = pytest.mark.slow

SEEDS = [1, 2]
ONE = {"seeds": SEEDS[:1]}
"""The first plan has all of it: cut samples, replays, recomputed layers, weight gradients as passes of their own."""
WINDOWS = {"window_size": (5, 0), "window_attn_skip_freq": 2, "apply_query_key_layer_scaling": True}
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {"pp": 2, "frozen": "embedding", **ONE}, id="pp2, embedding frozen"),
    only_full(2, {"overlap": True}, id="dp2"),
    pytest.param(2, {"pp": 2, "num_layers_in_first_pipeline_stage": 1, **ONE}, id="pp2, a first stage of one layer"),
    only_full(2, {"pp": 2, "pipeline_model_parallel_layout": "Ettt|tL"}, id="pp2, a layout"),
    pytest.param(2, {"pp": 2, **WINDOWS}, id="pp2, windows"),
    only_full(4, {"pp": 2, "overlap": True, "queued": True}, id="dp2pp2, one queue"),
    pytest.param(4, {"pp": 2, **SHARES, "queued": True, **ONE}, id="tp2pp2 in shares, one queue"),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_random_plans_give_the_gradients_of_the_stock_loop(on_ranks, size, layout):
    results = on_ranks(size, "user_plans", **{"seeds": SEEDS, **layout})
    as_stock(results, ("cut", "recomputed", "replayed", *([] if layout.get("sequence_parallel") else ["weights"])))
    assert all(found["reports"] == found["losses"] for rank in results for found in rank[:-1])


LOSSES = {**ROUTER_LOSSES, "moe_shared_expert_intermediate_size": 16}
FEW_SLICES = {"pieces": (1, 1, 2, 5)}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        only_full(2, {"ep": 2, **WITHOUT_LOSSES}, id="ep2, padded"),
        pytest.param(2, {"ep": 2, **LOSSES, **ONE}, id="ep2, losses"),
        only_full(4, {"ep": 2, "pp": 2, **LOSSES}, id="ep2pp2, losses"),
        only_full(4, {"ep": 2, "overlap": True, **WITHOUT_LOSSES}, id="ep2dp2, padded"),
    ],
)
def test_random_plans_give_the_gradients_of_a_stock_loop_with_experts(on_ranks, size, layout):
    results = on_ranks(size, "user_plans", **{"seeds": SEEDS, **layout}, how=FEW_SLICES)
    # Megatron's scores for losses are float32.
    as_stock(results, ("cut", "replayed"), grad=1e-7 if "full" in layout else 1e-9)


def test_a_users_loop_copies_experts(on_ranks):
    for found in on_ranks(2, "copied", **WITHOUT_LOSSES):
        assert found["error"] < 1e-9
        assert found["copies"] > 0
        assert "fp8" in found["told"]
        (first, none), (second, some) = found["later"]
        assert max(first, second) < 1e-9
        assert none == 0 < some, "copies follow the loads of earlier steps"


def test_the_pipeline_plugin_orders_a_users_loop(on_ranks):
    settings = [{"max_tokens": 32}, {"max_tokens": 32, "activation_gib": 1.5e-4}]
    for rank in on_ranks(4, "plugin_plans", settings=settings, pp=2, overlap=True):
        for found in rank:
            assert found["made_by"] == "pipeline"
            assert found["order"]
            assert found["cut"]
            assert found["tokens"] <= 32
            assert found["grad"] < 1e-9
            assert found["groups"] == 0, "a session leaves no process groups behind"
        assert [bool(found["recomputed"]) for found in rank] == [False, True]


def test_packs_are_filled_up_and_the_largest_runs_first(on_ranks):
    settings = [{"max_tokens": 64, "slices": "off", "round_tokens": 4, "largest_first": True}]
    for (found,) in on_ranks(2, "plugin_plans", settings=settings, plugin="packing", overlap=True, micro_batches=6):
        assert found["grad"] < 1e-9
        assert len(found["ran"]) > 2
        assert len(set(found["ran"])) > 1, "packs of one size are in any order"
        assert found["ran"] == sorted(found["ran"], reverse=True)
        assert not any(tokens % 4 for tokens in found["ran"] if tokens > 1), found["ran"]


CHAINS = {"pieces": [4], "asymmetric": False, "replay": "none", "recompute": True}
MUTANTS = ["restarted positions", "shifted labels", "dropped accumulator", "plan of the latest", "uncounted tokens"]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_catches_planted_faults(on_ranks, mutant):
    results = on_ranks(1, "user_plans", seeds=[2, 4], how=CHAINS, mutant=mutant)
    *planned, sound = results[0]
    assert any(found.get("error") or found["grad"] > 1e-4 for found in planned), planned
    assert sound["grad"] == 0


def test_models_whose_attention_or_positions_are_not_known_run_whole_samples_in_any_order(on_ranks):
    said = []
    for found in on_ranks(2, "stays_whole", seeds=[1, 2]):
        assert max(found["errors"]) < 1e-12
        assert found["left"] == 0, "a plan that its host cannot run leaves the batch as it is"
        assert found["notes"] == {"own"}, "arguments of the user's own reach the model"
        said.append(found["said"])
    assert said == [[1, 1, 1], [0, 0, 0]], "the first rank says so, once"


def test_attention_is_looked_at_before_the_first_step(on_ranks):
    (said,) = on_ranks(1, "attention_rules")
    wanted = {
        "dropout": "attention_dropout 0.1 is known to whole samples alone",
        "clip": "qk_clip True",
        "window, shared": "window_size (5, 0)",
        "rope": "OtherRope knows borders",
        "all before": "window_size (-1, 0)",
        "ahead": "window_size (5, 5)",
        "sink": "softmax_type learnable",
        "no mask": "attn_mask_type AttnMaskType.no_mask",
        "cross": "attention_type cross",
        "stranger": "Identity",
    }
    free = {"as it is", "window", "no window, shared"}
    assert said.keys() == wanted.keys() | free
    assert not any(said[name] for name in free), said
    for name, part in wanted.items():
        assert part in said[name], f"{name}: {said[name]}"


def test_a_loop_that_cannot_run_an_order_is_told_why(on_ranks):
    (told,) = on_ranks(1, "refusals")
    wanted = {
        "stranger inside, ordered": "megatron_tests.user_jobs.refusals.<locals>.louder (",
        "stranger outside": "functools.partial functools.partial(<function get_forward_backward_func",
        "overlap_p2p_comm": "overlap_p2p_comm True",
        "num_microbatches_with_partial_activation_checkpoints": "Megatron's schedule says what is recomputed",
        "hidden_dropout": "a plan with replayed micro-batches cannot run a model with dropout",
        "attention dropout, cut": "whole sequences only",
        "loss": "not connected to the model's output",
        "no loss": "does not return (sum of token losses",
    }
    runs = {"fine", "stranger inside, stock", "attention dropout, whole"}
    assert told.keys() == wanted.keys() | runs
    for name, part in wanted.items():
        assert part in told[name], f"{name}: {told[name]}"
    assert not any(told[name] for name in runs), told
    assert all(
        "already patched by someone else" in told[f"stranger {where}"] for where in ("inside, ordered", "outside")
    )


def test_a_session_leaves_symbols_model_config_and_held_functions_as_they_were(on_ranks):
    for found in on_ranks(2, "left_behind"):
        assert found.pop("changed") == found.pop("restored") == [True] * 3
        assert found == {"same": True, "plans": 1, "shapes": [(2, 64)], "error": 0.0}
