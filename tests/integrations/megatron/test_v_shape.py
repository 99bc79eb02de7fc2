"""Two stages on each device of a pipeline: weights, and schedules drawn by lot against plain training in float64."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from evenload.core.laws import check
from evenload.core.plan_json import step_json
from harness.cases import only_full
from harness.proof import random_pipeline, random_plan
from harness.proof.pipelines import in_v
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

LENGTHS = [37, 5, 64, 2]
V = {"plugins__pipeline": {"enabled": True, "v_shape": True}}
LAYOUTS = {
    "pp2": (2, {"parallel__pp": 2}),
    "pp2 dp2": (4, {"parallel__pp": 2}),
    "pp2 tp2": (4, {"parallel__pp": 2, "parallel__tp": 2, "model__tied_embeddings": True}),
    "pp4": (4, {"parallel__pp": 4, "model__num_layers": 8}),
}
KINDS = [
    {"recompute": "some", "split": "some"},
    {"recompute": "all", "split": "none"},
    {"recompute": "none", "split": "all", "pieces": [1, 16]},
    {"recompute": "some", "split": "some", "replay": "some"},
]


def sizes_of(layout):
    size, changes = LAYOUTS[layout]
    devices = changes["parallel__pp"]
    return {
        "num_ranks": size // devices // changes.get("parallel__tp", 1),
        "num_stages": 2 * devices,
        "layers_per_stage": changes.get("model__num_layers", 4) // (2 * devices),
    }


def drawn(seed, layout, **how):
    return random_pipeline(Random(seed), LENGTHS, v_shape=True, **sizes_of(layout), **how)


def run(on_ranks, layout, plans, **more):
    size, changes = LAYOUTS[layout]
    written = [step_json(plan) for plan in plans]
    return on_ranks(size, "piped", plans=written, lengths=LENGTHS, **changes, **V, **more)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        pytest.param("pp2", KINDS, id="pp2"),
        pytest.param("pp2 dp2", KINDS[3:], id="pp2 dp2"),
        pytest.param("pp2 tp2", KINDS[:1], id="pp2 tp2"),
        pytest.param("pp4", KINDS[:1], id="pp4"),
        *(only_full(layout, KINDS, id=f"{layout}, all") for layout in LAYOUTS if layout != "pp2"),
    ],
)
def test_drawn_schedules_give_the_gradients_of_plain_training(on_ranks, layout, kinds):
    plans = [drawn(seed, layout, **how) for seed, how in enumerate(kinds)]
    exact(run(on_ranks, layout, plans), LAYOUTS[layout][1], LENGTHS)


@pytest.mark.parametrize("layout", ["pp2", only_full("pp2 dp2"), only_full("pp4")])
def test_devices_of_one_queue_and_backwards_of_other_groups(on_ranks, layout):
    """Schedules by lot, and a plan whose backward packs other slices than its forward did."""
    seed = 3
    regrouped = check(in_v(Random(seed), random_plan(seed, LENGTHS, asymmetric=True, **sizes_of(layout))))
    plans = [regrouped, *(drawn(seed, layout, **how) for how in (KINDS[0], KINDS[3]))]
    exact(run(on_ranks, layout, plans, one_queue=True), LAYOUTS[layout][1], LENGTHS)


def test_frozen_parameters_have_no_gradient_and_the_others_theirs(on_ranks):
    # All of stage 0, and part of stage 1, whose device trains another stage.
    frozen = ["embedding.*", "decoder.layers.0.*", "*.1.mlp.*"]
    results = run(on_ranks, "pp2", [drawn(5, "pp2", **KINDS[0])], train__freeze=frozen)
    for found, number in zip(results, (3, 1), strict=True):
        assert found[0]["loss"] < 1e-12
        assert found[0]["grad"] < 1e-9
        names = found[0]["names"]
        assert any(f".layers.{number}." in name for name in names)
        assert not [n for n in names if n.startswith(("embedding", "decoder.layers.0.", "decoder.layers.1.mlp"))]


def test_in_bfloat16_gradients_are_those_of_float32_from_the_same_weights(on_ranks):
    plans = [drawn(seed, "pp2", **KINDS[seed]) for seed in (0, 3)]
    for rank in run(on_ranks, "pp2", plans, train__dtype="bf16"):
        for found in rank:
            assert found["loss"] < 1e-3
            assert found["grad"] < 3e-2


def test_devices_hold_the_weights_of_their_stages(on_ranks):
    whole = on_ranks(1, "initial_weights")[0]
    parts = on_ranks(2, "initial_weights", parallel__pp=2, **V)
    assert [{int(n.split(".")[2]) for n in part if ".layers." in n} for part in parts] == [{0, 3}, {1, 2}]
    assert {n for n in whole if ".layers." not in n} <= parts[0].keys()
    together = parts[0] | parts[1]
    assert len(together) == len(parts[0]) + len(parts[1])
    assert together.keys() == whole.keys()
    assert all(np.array_equal(whole[name], together[name]) for name in whole)
