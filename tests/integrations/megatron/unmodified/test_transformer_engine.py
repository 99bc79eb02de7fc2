"""Transformer Engine's layer spec, latent attention and windows in a user's loop: the gradients of the stock loop.

Transformer Engine itself needs CUDA; a stand-in with its signatures takes its place (te_standin.py), and
benchmarks/gpu/transformer_engine.py holds the real one to the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.cases import only_full
from harness.world import World
from megatron_tests.settings import SHARES

pytestmark = pytest.mark.slow


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: a job over the stand-in, and the formats of its attention's calls."""
    from megatron_tests import calling, te_standin

    if "transformer_engine" not in sys.modules:
        te_standin.install()
    te_standin.calls.clear()
    return calling.call(job, arguments), sorted(set(te_standin.calls))


@pytest.fixture(scope="module")
def over(forge: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Two ranks of their own, which import Megatron after the stand-in."""
    world = World(forge("torch"), 2, tmp_path_factory.mktemp("world"))
    yield lambda job, **arguments: world.run(call, job, arguments)
    if world.active:
        world.close()


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
    for results, called in over("user_plans", seeds=[1, 2], te=True, **loop):
        for found in results:
            assert "error" not in found, found
            assert found["grad"] < 1e-9, found
            assert found["loss"] < 1e-7, found
        assert any(found["cut"] for found in results)
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


def test_the_script_for_a_gpu_compares_every_case() -> None:
    """Over the stand-in, which has no fp8; that case is recorded as failed."""
    root = Path(__file__).parents[4]
    planted = f"import runpy, sys; sys.path.insert(0, {str(root / 'tests/integrations/megatron')!r}); "
    planted += "import te_standin; te_standin.install(); sys.argv = ['script', '--tiny', '--json']; "
    planted += f"runpy.run_path({str(root / 'benchmarks/gpu/transformer_engine.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", planted], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *rows, fp8 = json.loads(done.stdout)["rows"]
    assert [row["case"] for row in rows] == ["plain", "fused rotary", "window", "latent"]
    for row in rows:
        assert max(row["whole"]["error"], row["slices"]["error"]) < 1e-12
        assert row["whole"]["thd"] > 0 == row["whole"]["sbhd"] == row["slices"]["sbhd"]
    assert "failed" in fp8
