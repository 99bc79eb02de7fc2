"""Copies that follow the loads of earlier steps: a run that was interrupted has those of one that was not."""

import shutil

import pytest

pytestmark = pytest.mark.slow

RECIPE = """
trainer: megatron
model: {family: mixtral, num_layers: 2, hidden_size: 32, num_attention_heads: 4, moe: {num_experts: 8, topk: 2}}
data: {max_length: 256, long_samples: truncate}
parallel: {dp: 2, ep: 2}
train: {steps: 5, global_batch_size: 6, lr: 1.0e-2}
checkpoint: {every: 3}
plugins: {packing: {enabled: true, max_tokens: 512}, moe: {enabled: true, mode: layout}}
"""


def test_a_resumed_run_copies_the_experts_that_one_without_an_end_copies(tmp_path, ran):
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def steps(*arguments):
        rows = ran(tmp_path, "train", "recipe.yaml", *arguments)["steps"]
        return [(row["loss"].hex(), {k: v for k, v in row["moe"].items() if k != "exposed_s"}) for row in rows]

    whole = steps("checkpoint.dir=whole", "checkpoint.keep=9")
    assert [moe["copies"] > 0 for _, moe in whole] == [False, False, True, True, True], "two steps know nothing"
    shutil.copytree(tmp_path / "whole" / "step00000003", tmp_path / "kept" / "step00000003")
    assert steps("checkpoint.dir=kept") == whole[3:]
