"""The shipped recipe that fine-tunes: from a folder that it makes, by prompts and validation, into one that leaves."""

import shutil
from pathlib import Path

import pytest
from evenload.core.recipe.pretrained import folder_of
from evenload.core.recipe.recipe import file_of
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def test_a_tiny_model_learns_is_validated_and_leaves_alike_by_both_trainers(tmp_path, ran):
    changes = ("train.steps=4", "train.warmup_steps=1", "train.global_batch_size=16")
    changes += ("data.validation.every=2", "data.validation.batches=1")
    shutil.copy(file_of("finetune"), tmp_path / "r.yaml")
    result = ran(tmp_path, "train", "r.yaml", *changes, "train.export=out")
    assert [row["step"] for row in result["validation"]] == [0, 2, 4]
    losses = [row["loss"] for row in result["validation"]]
    assert losses[2] < losses[1] < losses[0]
    assert 0.5 < result["data"]["targets"] / result["data"]["tokens"] < 0.8  # prompts carry no loss
    agreement = result["export"]["agreement"]
    assert (agreement["prompts"], agreement["equal"]) == (10, 10)
    assert agreement["largest_difference"] < 1e-4
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(result["export"]["files"])
    ran(tmp_path, "train", "r.yaml", *changes, "trainer=deepspeed", "data.validation=null", "train.export=other")
    folders = folder_of(Path("tiny-llama")), tmp_path / "out", tmp_path / "other"
    before, one, other = (load_file(f"{folder}/model.safetensors") for folder in folders)
    for name, weight in before.items():
        update = (one[name] - weight).norm()
        assert (one[name] - other[name]).norm() < 1e-4 * update, f"the trainers export another {name}"
