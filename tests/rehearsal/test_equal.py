"""The rehearsal's numbers are the CPU's: to the last bit where ops are the same, else to the rounding of float64."""

import json

import pytest

from .conftest import TESTS, enabling
from .test_recipes import RECIPES, SMALL, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.cuda]


@pytest.mark.parametrize("recipe", ["slices", "mesh", "pipeline"])
def test_a_recipe_has_the_numbers_of_the_cpu_in_float64(recipe, forge, tmp_path):
    layout = ("parallel.dp=2",) if recipe == "mesh" else ()
    words = ("train", str(RECIPES / f"{recipe}.yaml"), *SMALL[:-1], "train.dtype=fp64", "costs=cpu", *layout, "--json")
    results = {}
    for trainer in ("megatron", "cuda+megatron"):
        done = forge(trainer).run(tmp_path, words, 2)
        assert done.returncode == 0, done.stderr[-3000:]
        steps = json.loads(done.stdout)["steps"]
        results[trainer] = [number for row in steps for number in (row["loss"], row["grad_norm"])]
    assert len(results["megatron"]) == 2 * STEPS
    assert results["cuda+megatron"] == pytest.approx(results["megatron"], rel=1e-14)


def test_a_script_of_transformers_has_the_numbers_of_the_cpu_to_the_last_bit(forge, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 128}}\n"
    )
    text, on_cpu = (TESTS / "scripts" / "trainer_script.py").read_text(), "    use_cpu=True,\n"
    assert on_cpu in text
    results = {}
    for trainer, where in (("huggingface", on_cpu), ("cuda+huggingface", "")):
        place = tmp_path / trainer
        place.mkdir()
        (place / "script.py").write_text(text.replace(on_cpu, f"{where}    logging_steps=1,\n"))
        words, planted = (str(place / "out"),), enabling(tmp_path / "recipe.yaml")
        done = forge(trainer).run(place, words, 2, planted, place / "script.py")
        assert done.returncode == 0, done.stderr[-3000:]
        folder = place / "out" / "checkpoint-2"
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        losses = [(row["loss"], row["grad_norm"]) for row in history if "loss" in row]
        assert len(losses) == 2
        results[trainer] = [*losses, (folder / "model.safetensors").read_bytes()]
    assert results["huggingface"] == results["cuda+huggingface"]
