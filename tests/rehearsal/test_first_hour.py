"""`evenload doctor --gpu` and every stage of `benchmarks/gpu/run.sh` on a rehearsed GPU, as commands that start others.

Their seconds mean nothing, and the device's name says so on every page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import TESTS, module_at
from .driver import NAME

pytestmark = [pytest.mark.slow, pytest.mark.cuda]

STAGES = module_at("../benchmarks/gpu/stages.py")
SHORT = ("data.max_length=256", "plugins.packing.max_tokens=512", "train.steps=3")
SMALL = (
    *SHORT, "train.global_batch_size=8",
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "model.ffn_hidden_size=128", "model.vocab_size=256",
)  # fmt: skip
LIMIT_S = 540
TOKENS = {"slices": 320, "chunks": 512}
"""Of the smallest run of a script that shows all of it; else 128."""


def rehearsed(ledgers: Path, gpus: int = 1) -> Mapping[str, str]:
    """The environment in which every Python that starts has so many GPUs."""
    ledgers.mkdir()
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    site = {"PYTHONPATH": str(TESTS / "rehearsal" / "site"), "REHEARSAL_OUT": str(ledgers)}
    return {**clean, **site, "REHEARSAL_GPUS": str(gpus), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def faults_in(ledgers: Path) -> set[str]:
    files = list(ledgers.glob("rank.*.json"))
    assert files, "nothing was rehearsed"
    return {fault for file in files for fault in json.loads(file.read_text())["faults"]}


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_first_hour(tmp_path: Path) -> None:
    """On two GPUs: all of its parts end well, nothing is refused, and the page has what each of them measured."""
    command = [sys.executable, "-P", "-m", "evenload", "doctor", "--gpu", "quickstart", *SHORT]
    environment = rehearsed(tmp_path / "ledgers", 2)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-4000:]
    assert faults_in(tmp_path / "ledgers") == set()
    text = (tmp_path / "evenload-gpu" / "page.md").read_text()
    assert text.startswith(f"# The first hour of evenload on {NAME}")
    assert NAME in (tmp_path / "evenload-gpu" / "costs.yaml").read_text()
    result = json.loads((tmp_path / "evenload-gpu" / "result.json").read_text())
    assert result["well"]
    parts = {name: row["result"] for name, row in result["parts"].items()}
    exact = {row["kernel"] for row in parts["kernels"]["rows"] if row["status"] == "exact"}
    assert exact == {"torch_varlen", "sdpa", "torch_flash", "plain", "grouped product"}
    assert {row["how"] for row in parts["devices"]["links"]} == {"page-locked", "pageable", "direct"}
    timed = {row["collective"] for row in parts["profile"]["links"]["intra"]["timings"]}
    assert timed == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert parts["verify"]["exact"]
    assert parts["train"]["comparison"]["stock"]["loss_rel_diff"] < 1e-2
    assert parts["train"]["host"]["attention"] == "torch_varlen"
    for part in ("GPUs", "Installed", "Kernels", "Against plain training", "Against stock", "Profile", "Costs"):
        assert f"## {part}" in text


def smaller(stage: object) -> list[str]:
    """The arguments of a stage, for sizes that a CPU runs."""
    words = list(stage.arguments)
    if "evenload" in words:
        return [*words, *SMALL]
    name = Path(words[1]).stem
    if "--tokens" in words:
        words[words.index("--tokens") + 1] = str(TOKENS.get(name, 128))
        words[words.index("--limit") + 1] = str(LIMIT_S)
    more = {"attention": ["--tokens", "128"], "ring": ["--tiny", "--places", "3"]}
    return [*words, *more.get(name, ["--tiny"])]


COVERED = (
    "first hour",
    "tests",
    "slices 262144",
    "verify megatron fp32",
    "verify deepspeed fp32",
    "bench megatron bf16",
)
"""By the first hour above, by GPU tests in test_exact.py, by `verify` in test_scripts.py, by another length."""
REHEARSED = [one for one in STAGES.stages() if one.name not in COVERED]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("stage", REHEARSED, ids=lambda stage: stage.name)
def test_a_stage_of_the_gpu_run(stage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rehearsed(tmp_path / "ledgers").items():
        monkeypatch.setenv(name, value)
    small = STAGES.Stage(stage.name, tuple(smaller(stage)), LIMIT_S, stage.in_root)
    row = STAGES.run(small, LIMIT_S, tmp_path)
    if stage.name.startswith("transformer_engine"):
        assert "Transformer Engine is not installed" in row["stderr"]
        return
    assert row["exit_code"] == 0, row
    assert faults_in(tmp_path / "ledgers") == set()
    if "evenload" in small.arguments:
        assert row["result"].get("exact", True)
    else:
        assert '"failed":' not in json.dumps(row["result"])
