"""Recipes: what they accept, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import evenload
import jsonschema
import pytest
import yaml
from evenload.core import recipe as recipes
from evenload.core.errors import EvenloadError
from evenload.core.setting import RECIPES
from evenload.face import load_plugins

ROOT = Path(evenload.__file__).parent
load_plugins()


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("train: {steps: 3}\nplugins: {packing: {enabled: true}}\n")
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_open_with_their_command(path: Path) -> None:
    evenload.load_recipe(path)
    assert path.read_text().startswith("# evenload ") or path.read_text().startswith("# torchrun ")
    jsonschema.validate(yaml.safe_load(path.read_text()), recipes.json_schema())


def test_committed_schema_is_in_step() -> None:
    committed = json.loads((ROOT / "docs" / "recipe.schema.json").read_text())
    assert committed == recipes.json_schema(), "run `make docs`"


def test_overrides_are_yaml(recipe_file: Path) -> None:
    recipe = evenload.load_recipe(
        recipe_file, ["train.steps=7", "plugins.packing.max_tokens=99", "parallel.dp=null", "data.source=a=b"]
    )
    assert recipe.train.steps == 7
    assert recipe.config_of("packing").max_tokens == 99  # type: ignore[attr-defined]
    assert recipe.parallel.dp is None
    assert recipe.data.source == "a=b"


def test_recipes_are_frozen(recipe_file: Path) -> None:
    recipe = evenload.load_recipe(recipe_file)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train = None  # type: ignore[assignment]
    assert recipe.changed({"train.steps": 9}).train.steps == 9
    assert recipe.train.steps == 3


REFUSED = {
    "unknown section": (["trian.steps=3"], "did you mean 'train'"),
    "unknown key": (["train.stepz=3"], "did you mean 'steps'"),
    "unknown plugin": (["plugins.packin.enabled=true"], "did you mean 'packing'"),
    "unknown plugin key": (["plugins.packing.max_token=3"], "did you mean 'max_tokens'"),
    "wrong type": (["train.steps=many"], "train.steps is not valid"),
    "negative": (["train.steps=-1"], "train.steps is not valid"),
    "unknown dtype": (["train.dtype=fp8"], "train.dtype is not valid"),
    "tp against heads": (["parallel.tp=3"], "tp does not divide the attention heads"),
    "tp against groups": (["model.num_query_groups=1", "parallel.tp=2"], "tp does not divide the attention heads"),
    "pp against layers": (["parallel.pp=3"], "pp does not divide model.num_layers"),
    "heads against hidden": (["model.num_attention_heads=7"], "does not divide model.hidden_size"),
    "batch against ranks": (["parallel.dp=8", "train.global_batch_size=4"], "smaller than the number"),
    "deepspeed tp": (["trainer=deepspeed", "parallel.tp=2"], "without tensor"),
    "deepspeed pipeline": (["trainer=deepspeed", "parallel.pp=2", "deepspeed.zero_stage=2"], "ZeRO 0 and 1"),
    "layers that stages do not divide": (["parallel.pp=3"], "does not divide model.num_layers"),
    "deepspeed fp64": (["trainer=deepspeed", "train.dtype=fp64"], "float64"),
    "not key=value": (["train.steps"], "key=value"),
    "below a value": (["train.steps.more=3"], "cannot be set"),
    "not yaml": (["train.steps=[1"], "not YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_what_to_do(name: str, recipe_file: Path) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(EvenloadError, match=message) as caught:
        evenload.load_recipe(recipe_file, overrides)
    assert caught.value.what
    assert caught.value.found
    assert caught.value.do


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n- b\n", "no mapping"), ("a: [", "not YAML"), (None, "cannot be read")]
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvenloadError, match=message):
        evenload.load_recipe(path)
