"""A Megatron-Core script that nobody edited, stock and with evenload: by torchrun, forked, and in one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.cases import full, only_full

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[3] / "scripts" / "megatron_script.py"
CAP = 128
ON = f"trainer: megatron\nplugins: {{packing: {{enabled: true, max_tokens: {CAP}}}}}\n"
ORDERED = f"trainer: megatron\nplugins: {{pipeline: {{enabled: true, max_tokens: {CAP // 4}}}}}\n"
OFF = "trainer: megatron\n"


def start(folder: Path, name: str, recipe: str, ranks: int, words: tuple[str, ...], scripted=None) -> dict:
    """Run the script by torchrun through `evenload run`, or forked and enabled; results by dtype and rank."""
    import torch

    out = folder / name
    out.mkdir()
    (out / "recipe.yaml").write_text(recipe)
    if scripted:
        enable = f"import evenload; evenload.enable({str(out / 'recipe.yaml')!r})"
        done = scripted("megatron", out, SCRIPT, "--out", out, *words, ranks=ranks, planted=enable)
    else:
        done = launch(out, ranks, words)
        assert "nothing was switched on" not in done.stderr
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        dtype: [torch.load(out / f"{dtype}.rank{rank}.pt") for rank in range(ranks)]
        for dtype in ("fp32", "fp64")
        if dtype in words
    }


def launch(out: Path, ranks: int, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    if "lo" in (interface for _, interface in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    evenload = [sys.executable, "-m", "evenload", "run", str(out / "recipe.yaml"), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*evenload, *torchrun, str(SCRIPT), "--out", str(out), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module", params=["forked", pytest.param("by torchrun", marks=full)])
def data_parallel(request, tmp_path_factory, scripted):
    """(stock, planned) results of 2 data-parallel ranks, gradient reduction overlapped."""
    folder = tmp_path_factory.mktemp("dp")
    words = ("--dtypes", "fp32", "fp64", "--overlap")
    planned = start(folder, "planned", ON, 2, words, scripted if request.param == "forked" else None)
    return start(folder, "stock", OFF, 2, words, scripted), planned


def test_a_rank_without_evenload_is_named_and_not_waited_for(tmp_path, scripted):
    (tmp_path / "recipe.yaml").write_text(ON)
    planted = (
        "import os, evenload\nfrom evenload.integrations.unmodified.planned_runs import watch_process\n"
        f"if os.environ['RANK'] == '0':\n    watch_process()\n    evenload.enable({str(tmp_path / 'recipe.yaml')!r})"
    )
    words = ("--out", tmp_path, "--dtypes", "fp32")
    done = scripted("megatron", tmp_path, SCRIPT, *words, ranks=2, planted=planted)
    assert done.returncode == 1
    assert done.stderr.count("evenload: ") == done.stderr.count("evenload: rank 1 of 2 runs without evenload") == 1


def worst(name: str, planned: dict, stock: dict) -> float:
    """Largest ||a - b|| / ||b|| over the tensors."""
    return max(float((planned[name][p] - t).norm() / t.norm()) for p, t in stock[name].items())


def computed(result: dict) -> int:
    return sum(rows * tokens for rows, tokens in result["shapes"])


def test_in_float64_the_same_gradients_and_weights(data_parallel):
    for stock, planned in zip(*(results["fp64"] for results in data_parallel), strict=True):
        assert worst("gradients", planned, stock) < 1e-12
        assert worst("weights", planned, stock) < 1e-10


def test_in_float32_the_same_losses_and_weights_under_the_distributed_optimizer(data_parallel):
    for stock, planned in zip(*(results["fp32"] for results in data_parallel), strict=True):
        for (loss, num_tokens), (wanted, wanted_tokens) in zip(planned["losses"], stock["losses"], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert num_tokens == wanted_tokens
        assert worst("weights", planned, stock) < 1e-4
        assert planned["weights"].keys() == stock["weights"].keys()


def test_packs_under_the_cap_are_computed_in_place_of_padding(data_parallel):
    for stock, planned in zip(*(results["fp32"] for results in data_parallel), strict=True):
        assert set(stock["shapes"]) == {(2, 64)}
        assert all(rows == 1 and tokens <= CAP for rows, tokens in planned["shapes"])
        assert computed(planned) < computed(stock) / 2


def test_evaluation_is_left_alone(data_parallel):
    for stock, planned in zip(*(results["fp64"] for results in data_parallel), strict=True):
        assert planned["evaluated"] == stock["evaluated"] == [(2, 64)] * 3
        assert planned["evaluation"] == pytest.approx(stock["evaluation"], rel=1e-12)


@pytest.mark.parametrize(("kind", "recipe"), [pytest.param("--pp", ORDERED, id="pp"), only_full("--tp", ON, id="tp")])
def test_pipeline_or_tensor_parallel_beside_data_parallel(tmp_path, kind, recipe, scripted):
    words = ("--dtypes", "fp64", kind, "2", "--overlap")
    results = [start(tmp_path, *case, 4, words, scripted) for case in (("stock", OFF), ("planned", recipe))]
    for before, after in zip(*(one["fp64"] for one in results), strict=True):
        assert worst("gradients", after, before) < 1e-12
        assert worst("weights", after, before) < 1e-10
        assert [tokens for _, tokens in after["losses"]] == [tokens for _, tokens in before["losses"]]
        assert computed(after) < computed(before) / 2


@pytest.mark.parametrize("max_tokens", [only_full(CAP), 64])
def test_other_scripts_are_exact_too(on_ranks, max_tokens):
    (told,) = on_ranks(1, "other_losses", max_tokens=max_tokens)
    assert len(told) == 3
    assert all(error < 1e-12 for error in told.values()), told


def test_a_loop_that_cannot_be_regrouped_exactly_is_told_why(on_ranks):
    (told,) = on_ranks(1, "told_of_scripts")
    wanted = {
        "average": "",
        "mean of nothing": "something else than the mean",
        "experts": "overlap_moe_expert_parallel_comm True",
        "overlap": "config.no_sync_func = model.no_sync",
        "too long": "longer than plugins.packing.max_tokens",
        "two values": "2 values",
        "padding counted": "counts other tokens",
        "two batches": "more than one batch",
        "fine": "",
    }
    assert told.keys() == wanted.keys()
    for name, part in wanted.items():
        assert part in told[name] if part else not told[name], f"{name}: {told[name]}"


def test_packs_are_padded_for_matrix_products_in_few_bits(on_ranks):
    (found,) = on_ranks(1, "multiples")
    assert found == [1, 4, 16, 64, 32, 128, 512]
