"""Runs that end and go on, on a rehearsed GPU: checkpoints next to steps, weights that come and leave in folders."""

import json

import pytest

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
def test_a_run_saves_beside_its_steps_goes_on_and_leaves_as_a_folder(trainer, rehearse, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE.format(trainer=trainer, more=MORE[trainer]))

    def run(*words):
        return json.loads(rehearse(trainer, (*words, "--json"))[0].stdout)

    def losses(folder, *words):
        return [row["loss"] for row in run("train", "r.yaml", f"checkpoint.dir={folder}", *words)["steps"]]

    whole = losses("whole")
    assert len(whole) == 3
    assert losses("parts", "train.steps=2") + losses("parts") == whole
    left = [run("export", name, "--out", f"{name}_out")["files"] for name in ("whole", "parts")]
    assert left[0] == left[1]
    for name in left[0]:
        assert (tmp_path / "whole_out" / name).read_bytes() == (tmp_path / "parts_out" / name).read_bytes()
