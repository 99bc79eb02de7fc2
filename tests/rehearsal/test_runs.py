"""Runs that end and go on, on a rehearsed GPU: checkpoints beside steps, weights that come and leave in folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .seen import seen_in

pytestmark = [pytest.mark.slow, pytest.mark.cuda]

RECIPE = """
trainer: {trainer}
model: {{weights: tiny-llama}}
data: {{source: python-docstrings, max_length: 256, long_samples: truncate}}
parallel: {{dp: 2}}
train: {{steps: 3, global_batch_size: 8, dtype: bf16, lr: 1.0e-3}}
{more}
plugins: {{packing: {{enabled: true, max_tokens: 1024}}}}
"""
MORE = {
    "megatron": "megatron: {overlap_grad_reduce: true}\ncheckpoint: {every: 1, background: true}",
    "deepspeed": "deepspeed: {zero_stage: 3}\ncheckpoint: {every: 1}",
}


@pytest.mark.parametrize("trainer", MORE)
def test_a_run_saves_beside_its_steps_goes_on_and_leaves_as_a_folder(
    trainer: str, forge: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.format(trainer=trainer, more=MORE[trainer]))

    def run(*words: str) -> Any:
        done = forge(f"cuda+{trainer}").run(tmp_path, (*words, "--json"), 2)
        assert done.returncode == 0, done.stderr[-3000:]
        seen_in(done.outputs).check()
        return json.loads(done.stdout)

    def losses(name: str) -> list[float]:
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    run("train", "r.yaml", "checkpoint.dir=whole", "log.jsonl=whole.jsonl")
    run("train", "r.yaml", "checkpoint.dir=parts", "log.jsonl=first.jsonl", "train.steps=2")
    run("train", "r.yaml", "checkpoint.dir=parts", "log.jsonl=second.jsonl")
    assert len(losses("whole.jsonl")) == 3
    assert losses("first.jsonl") + losses("second.jsonl") == losses("whole.jsonl")
    left = [run("export", name, "--out", f"{name}_out")["files"] for name in ("whole", "parts")]
    assert left[0] == left[1]
    for name in left[0]:
        assert (tmp_path / "whole_out" / name).read_bytes() == (tmp_path / "parts_out" / name).read_bytes()
