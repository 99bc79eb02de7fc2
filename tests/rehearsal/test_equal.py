"""The rehearsal's numbers are the CPU's: to the last bit where ops are the same, else to the rounding of float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_recipes import RECIPES, SMALL, STEPS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "trainer_script.py"
FP64 = (*SMALL[:-1], "train.dtype=fp64", "costs=cpu")
PLANNED = "trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 128}}\n"


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["slices", "mesh", "pipeline"])
def test_a_recipe_has_the_numbers_of_the_cpu_in_float64(
    recipe: str, forge: Callable[[str], Any], tmp_path: Path
) -> None:
    layout = ("parallel.dp=2",) if recipe == "mesh" else ()
    results = {}
    for trainer in ("megatron", "cuda+megatron"):
        place = tmp_path / trainer
        place.mkdir()
        words = ("train", str(RECIPES / f"{recipe}.yaml"), *FP64, *layout, "log.jsonl=log.jsonl", "--json")
        done = forge(trainer).run(place, words, 2)
        assert done.returncode == 0, done.stderr[-3000:]
        steps = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
        results[trainer] = [number for row in steps if "loss" in row for number in (row["loss"], row["grad_norm"])]
    assert len(results["megatron"]) == 2 * STEPS
    assert results["cuda+megatron"] == pytest.approx(results["megatron"], rel=1e-14)


@pytest.mark.cuda
def test_a_script_of_transformers_has_the_numbers_of_the_cpu_to_the_last_bit(
    forge: Callable[[str], Any], tmp_path: Path
) -> None:
    text = SCRIPT.read_text()
    assert "    use_cpu=True,\n" in text
    (tmp_path / "recipe.yaml").write_text(PLANNED)
    planted = f"import evenload; evenload.enable({str(tmp_path / 'recipe.yaml')!r})"
    results = {}
    for trainer, where in (("huggingface", "    use_cpu=True,\n"), ("cuda+huggingface", "")):
        place = tmp_path / trainer
        place.mkdir()
        (place / "script.py").write_text(text.replace("    use_cpu=True,\n", f"{where}    logging_steps=1,\n"))
        done = forge(trainer).run(place, (str(place / "out"),), 2, planted, place / "script.py")
        assert done.returncode == 0, done.stderr[-3000:]
        folder = place / "out" / "checkpoint-2"
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        losses = [(row["loss"], row["grad_norm"]) for row in history if "loss" in row]
        assert len(losses) == 2
        results[trainer] = [*losses, (folder / "model.safetensors").read_bytes()]
    assert results["huggingface"] == results["cuda+huggingface"]
