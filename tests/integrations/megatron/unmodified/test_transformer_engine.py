"""Transformer Engine's layer spec, latent attention and windows in a user's loop: the gradients of the stock loop.

Transformer Engine itself needs CUDA; a stand-in with its signatures takes its place (te_standin.py), and
benchmarks/gpu/transformer_engine.py holds the real one to the same.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from harness.cases import full, only_full
from harness.world import World
from megatron_tests.exact import as_stock
from megatron_tests.settings import SHARES

pytestmark = pytest.mark.slow


def call(job, arguments):
    """Runs on a rank: a job over the stand-in, and the formats of its attention's calls."""
    from megatron_tests import calling, te_standin

    te_standin.calls.clear()
    return calling.call(job, arguments), sorted(set(te_standin.calls))


def install():
    """Runs on a rank, before Megatron is imported there."""
    from megatron_tests import te_standin

    te_standin.install()


@pytest.fixture(scope="module")
def standing_in(forge, tmp_path_factory):
    """Two ranks of their own, which import Megatron over the stand-in."""
    world = World(forge("torch"), 2, tmp_path_factory.mktemp("world"))
    world.run(install)
    yield world
    if world.active:
        world.close()


@pytest.fixture
def over(standing_in):
    return lambda job, **arguments: standing_in.run(call, job, arguments)


MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "original_max_position_embeddings": 32,
    "mscale_all_dim": 1.0,
}
FUSED = {"apply_rope_fusion": True, "bias_dropout_fusion": False}


@pytest.mark.parametrize(
    "loop",
    [
        only_full({"pp": 2}, id="pp2"),
        pytest.param({"overlap": True, "window_size": (5, 0), "window_attn_skip_freq": 2, **FUSED}, id="windows"),
        pytest.param({**SHARES, "qk_layernorm": True, "softmax_scale": 0.2}, id="tp2 in shares, scale"),
        pytest.param({"positions": "yarn", **FUSED}, id="yarn"),
        pytest.param({"pp": 2, "rotary_interleaved": True, **FUSED}, id="interleaved"),
        pytest.param({"mla": True, "rope_type": "yarn", **MLA}, id="latent, yarn"),
        only_full({**SHARES, "mla": True, "rope_type": "rope", **MLA}, id="latent, tp2 in shares"),
    ],
)
def test_random_plans_give_the_gradients_of_the_stock_loop(over, loop):
    for results, called in over("user_plans", seeds=[1], te=True, **loop):
        as_stock([results], ("cut",))
        assert "sbhd" in called
        assert "thd" in called, "packs of whole samples go to Transformer Engine"


@pytest.mark.parametrize("loop", [only_full({}, id="plain"), pytest.param({"mla": True, **MLA}, id="latent")])
def test_shared_samples_give_the_gradients_of_the_stock_loop(over, loop):
    cases = [{"max_tokens": 64, "instead": "cp_all"}, {"cut": 0}]
    for results, called in over("shared_steps", cases=cases, te=True, **loop):
        for result in results:
            assert "error" not in result, result
            assert result["grad"] < 1e-9, result
            assert result["comms"], "samples are shared"
        assert "sbhd" in called


def rows_of_the_script():
    """Runs on a rank: what benchmarks/gpu/transformer_engine.py measures, tried out on a CPU."""
    import torch
    from evenload.integrations.megatron.base.plane import leave_groups
    from evenload.patches import bridge_cpu
    from harness.rank import load

    bridge_cpu()
    script = load(str(Path(__file__).parents[4] / "benchmarks" / "gpu" / "transformer_engine.py"))
    with patch.object(script, "close_world", lambda _: leave_groups()):
        shape = script.Shape(64, hidden=32, heads=4, dtype=torch.float64)
        return script.benchmark(shape, float("inf"))["rows"]


@full
def test_the_script_for_a_gpu_compares_every_case(standing_in):
    """Over the stand-in, which has no fp8; that case is recorded as failed."""
    for *rows, fp8 in standing_in.run(rows_of_the_script):
        assert [row["case"] for row in rows] == ["plain", "fused rotary", "window", "latent"]
        for row in rows:
            assert max(row["whole"]["error"], row["slices"]["error"]) < 1e-12
            assert row["whole"]["thd"] > 0 == row["whole"]["sbhd"] == row["slices"]["sbhd"]
        assert "failed" in fp8
