"""A checkpoint of one version of megatron-core goes on in the other: the same weights, and the same losses after it.

`make test-newest` runs it, in the environment of the newest version; the pinned one lies beside it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evenload.integrations.host.versions import listed_version

ROOT = Path(__file__).parents[4]
HERE = Path(sys.executable)
PINNED = Path(os.environ.get("EVENLOAD_PINNED_PYTHON", ROOT / ".venv" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(listed_version("megatron-core") == "0.16.1", reason="make test-newest runs it"),
]

RECIPE = """
trainer: megatron
model: {family: llama, num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 128}
data: {source: rows.jsonl, max_length: 256}
train: {steps: 4, global_batch_size: 8, lr: 1.0e-2}
plugins: {packing: {enabled: true, max_tokens: 512}}
checkpoint: {every: 2, keep: 3}
"""
KINDS = {
    "fp32, DP 2, distributed optimizer": ("parallel.dp=2",),
    "bf16, experts, EP 2": ("parallel.dp=2", "parallel.ep=2", "train.dtype=bf16", "model.family=mixtral")
    + ("model.moe={num_experts: 4, topk: 2, bias_rate: 0.0}",),
}


@pytest.fixture
def place(tmp_path):
    """A folder with a recipe and its data."""
    random.seed(5)
    rows = ([random.randrange(128) for _ in range(random.randrange(8, 200))] for _ in range(40))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def train(python: Path, place: Path, name: str, kind: tuple[str, ...]) -> tuple[list[float], dict[str, bytes]]:
    """Losses of a run with checkpoints in the folder ``name``, or of its rest, and the weights behind its last step."""
    log, export = place / f"{name}.jsonl", place / f"{name}_export"
    words = (f"checkpoint.dir={place / name}", f"log.jsonl={log}", f"train.export={export}", "--json")
    command = [python, "-m", "evenload", "train", "recipe.yaml", *kind, *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = {path.name: path.read_bytes() for path in export.glob("*.safetensors")}
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()], weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward", [True, False], ids=["older to newer", "newer to older"])
def test_a_run_goes_on_in_the_other_version(place, kind, forward):
    before, after = (PINNED, HERE) if forward else (HERE, PINNED)
    losses, weights = train(before, place, "whole", KINDS[kind])
    assert len(losses) == 4
    assert weights
    shutil.copytree(place / "whole" / "step00000002", place / "rest" / "step00000002")
    went_on, same_weights = train(after, place, "rest", KINDS[kind])
    assert went_on == losses[2:]
    assert same_weights == weights
