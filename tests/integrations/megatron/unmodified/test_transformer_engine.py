"""Transformer Engine's layer spec, latent attention and windows in a user's loop: the gradients of the stock loop.

Transformer Engine itself needs CUDA; a stand-in with its signatures takes its place (te_standin.py), and
benchmarks/gpu/transformer_engine.py holds the real one to the same.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: a job of the folder's conftest.py over the stand-in."""
    folder, loaded = Path(__file__).parents[1], []
    for name in ("te_standin", "conftest"):
        file = f"megatron_{name}"
        if file not in sys.modules:
            spec = importlib.util.spec_from_file_location(file, folder / f"{name}.py")
            sys.modules[file] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[file])
            if name == "te_standin":
                sys.modules[file].install()
        loaded.append(sys.modules[file])
    standin, conftest = loaded
    standin.calls.clear()
    found = conftest.call(job, arguments)
    return found, sorted(set(standin.calls))


@pytest.fixture(scope="session")
def trainer() -> str:
    """Megatron is imported behind the stand-in."""
    return "torch"


@pytest.fixture(scope="module")
def over(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    def run(job: str, **arguments: Any) -> list[Any]:
        return world(2).run(call, job, arguments)

    return run


WHOLE = {"how": {"pieces": (1,), "asymmetric": False, "replay": "none", "recompute": True}}
SHARES = {"tp": 2, "sequence_parallel": True}
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
        pytest.param({"pp": 2}, id="pp2"),
        pytest.param({"overlap": True, "window_size": (5, 0), "window_attn_skip_freq": 2, **FUSED}, id="windows"),
        pytest.param({**SHARES, "qk_layernorm": True, "softmax_scale": 0.2}, id="tp2 in shares, scale"),
        pytest.param({"positions": "yarn", **FUSED}, id="yarn"),
        pytest.param({"pp": 2, "rotary_interleaved": True, **FUSED}, id="interleaved"),
        pytest.param({"mla": True, "rope_type": "yarn", **MLA}, id="latent, yarn"),
        pytest.param({**SHARES, "mla": True, "rope_type": "rope", **MLA}, id="latent, tp2 in shares"),
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


@pytest.mark.parametrize("loop", [pytest.param({}, id="plain"), pytest.param({"mla": True, **MLA}, id="latent")])
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
