"""Recipes: what they accept, and how they refuse."""

import json
from pathlib import Path

import evenload
import pytest
import yaml
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.core.recipe.elsewhere import ELSEWHERE
from evenload.core.recipe.recipe import RECIPES, shipped
from evenload.core.recipe.sections import Data, Model, Train

ROOT = Path(evenload.__file__).parent


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train: {steps: 3}\nplugins: {packing: {enabled: true}}\n")
    return path


@pytest.fixture(scope="module")
def schema():
    return recipes.json_schema()


@pytest.fixture(scope="module")
def validator(schema):
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_open_with_their_command(path, validator):
    evenload.load_recipe(path)
    assert path.read_text().startswith("# evenload ") or path.read_text().startswith("# torchrun ")
    validator.validate(yaml.safe_load(path.read_text()))


@pytest.mark.every_plugin
def test_committed_schema_is_in_step(schema):
    assert json.loads((ROOT / "docs" / "recipe.schema.json").read_text()) == schema, "run `make docs`"


def test_every_field_of_the_schema_says_what_it_is(schema):
    for section in (schema, *schema["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            assert "description" in field or "$ref" in field, f"{section['title']}.{name}"
    assert schema["$defs"]["Train"]["properties"]["lr"]["description"] == "The highest learning rate."


@pytest.mark.every_plugin
def test_keys_of_other_tools_lead_to_keys_that_exist():
    recipe = evenload.load_recipe("quickstart")
    for text in set(ELSEWHERE.values()):
        node = recipe
        for name in text.split(" ")[0].rstrip(",").split("."):
            node = getattr(node, name)
    assert not set(ELSEWHERE) & {*Train.model_fields, *Model.model_fields, *Data.model_fields}


def test_a_folder_on_the_command_line_takes_the_place_of_the_recipe_s_sizes():
    recipe = evenload.load_recipe("quickstart", ["model.weights=tiny-llama"])
    assert recipe.model == evenload.load_recipe("finetune").model
    assert recipe.model.num_layers != evenload.load_recipe("quickstart").model.num_layers


def test_overrides_are_yaml(recipe_file):
    recipe = evenload.load_recipe(
        recipe_file, ["train.steps=7", "plugins.packing.max_tokens=99", "parallel.dp=null", "data.source=a=b"]
    )
    assert recipe.train.steps == 7
    assert recipe.config_of("packing").max_tokens == 99
    assert recipe.parallel.dp is None
    assert recipe.data.source == "a=b"


def test_recipes_are_frozen(recipe_file):
    recipe = evenload.load_recipe(recipe_file)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train = None
    assert recipe.changed({"train.steps": 9}).train.steps == 9
    assert recipe.train.steps == 3


REFUSED = {
    "unknown section": (["trian.steps=3"], "did you mean 'train'"),
    "unknown key": (["train.stepz=3"], "did you mean 'steps'"),
    "a key of another tool": (["train.max_steps=3"], "that is train.steps here"),
    "a section that is null": (["checkpoint=null"], "set keys below it: dir, every"),
    "a plugin that is true": (["plugins.mesh=true"], "set keys below it: enabled"),
    "an id of the Hub": (["model.weights=Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
    "a size beside the folder's": (["model.weights=tiny-llama", "model.num_layers=9"], "says otherwise"),
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
    "deepspeed fp64": (["trainer=deepspeed", "train.dtype=fp64"], "float64"),
    "not key=value": (["train.steps"], "key=value"),
    "below a value": (["train.steps.more=3"], "cannot be set"),
    "not yaml": (["train.steps=[1"], "not YAML"),
    "an impossible date": (["train.lr=2001-99-99"], "train.lr is not valid"),
    "thousands of digits": ([f"train.seed={'1' * 4301}"], "not YAML"),
    "a tag that Python would run": (["train.lr=!!python/object/apply:os.getpid []"], "not YAML"),
    "brackets without end": ([f"data.text_key={'[' * 3000}"], "not YAML"),
    "aliases without end": (
        [f"plugins={{a: &a [{'l, ' * 99}], b: &b [{'*a, ' * 99}], c: [{'*b, ' * 999}]}}"],
        "not YAML",
    ),
    "a key of many parts": (["deepspeed.config." + "a." * 3000 + "b=1"], "cannot be set"),
    "a batch beyond memory": (["train.global_batch_size=100000000"], "train.global_batch_size is not valid"),
    "layers beyond sense": (["model.num_layers=1000000"], "model.num_layers is not valid"),
    "no number": (["planner.budget_ms=.nan"], "planner.budget_ms is not valid"),
    "a number without end": (["safety.stuck_s=.inf"], "safety.stuck_s is not valid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_what_to_do(name, recipe_file):
    overrides, message = REFUSED[name]
    with pytest.raises(EvenloadError, match=message) as caught:
        evenload.load_recipe(recipe_file, overrides)
    assert caught.value.what
    assert caught.value.found
    assert caught.value.do


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n- b\n", "no mapping"), ("a: [", "not YAML"), (None, "cannot be read")]
)
def test_files_that_are_no_recipe(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvenloadError, match=message):
        evenload.load_recipe(path)


@pytest.mark.parametrize("path", [None, 5, 5.5, True, b"x", {}, object(), "", "a\0b", "\ud800", "x" * 5000])
def test_paths_that_are_none_are_refused(path):
    with pytest.raises(EvenloadError, match="cannot be read"):
        evenload.load_recipe(path)


def test_a_shipped_recipe_is_read_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(shipped()) == {path.stem for path in RECIPES.glob("*.yaml")}
    for name, path in shipped().items():
        (tmp_path / name).mkdir()  # a folder is no recipe
        wanted = evenload.load_recipe(path).model_dump()
        assert evenload.load_recipe(name).model_dump() == evenload.load_recipe(Path(name)).model_dump() == wanted
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("train: {steps: 77}\n")
    assert evenload.load_recipe("quickstart").train.steps == 77, "a file of that name goes first"
    with pytest.raises(EvenloadError) as refused:
        evenload.load_recipe("gpu-nod")
    assert "did you mean 'gpu-node'?" in refused.value.do
    assert all(name in refused.value.do for name in shipped())


@pytest.mark.parametrize("overrides", [None, 5, "train.steps=7", [5], [None], [b"train.steps=7"], [""], ["="]])
def test_overrides_that_are_none_are_refused(recipe_file, overrides):
    with pytest.raises(EvenloadError, match="override"):
        evenload.load_recipe(recipe_file, overrides)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, 10**30])
def test_numbers_of_processes_that_are_none_are_refused(recipe_file, size):
    with pytest.raises(EvenloadError, match="the number of processes is not an integer"):
        evenload.plan(recipe_file, [5, 6], size)


def test_a_plan_of_more_slices_than_it_can_hold_is_refused(recipe_file):
    recipe = evenload.load_recipe(recipe_file, ["plugins.packing.max_tokens=8192"])
    with pytest.raises(EvenloadError, match="more than 32768 slices"):
        evenload.plan(recipe, [5, 10**9])


def test_an_override_changes_one_of_two_sections_that_share_an_anchor(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("plugins: {packing: &caps {enabled: true, max_tokens: 100}, pipeline: *caps}\n")
    recipe = evenload.load_recipe(path, ["plugins.packing.max_tokens=50"])
    assert [recipe.config_of(name).max_tokens for name in ("packing", "pipeline")] == [50, 100]


def test_how_long_a_run_is_and_how_large_its_batches_are_is_said_once():
    for both in (
        {"steps": 20, "epochs": 2},
        {"epochs": 2, "max_tokens": 9},
        {"global_batch_size": 64, "global_batch_tokens": 9},
    ):
        with pytest.raises(EvenloadError, match="say the same thing twice"):
            recipes.parse({"train": both})
    recipe = recipes.parse({"train": {"steps": 50, "global_batch_size": 8}}).changed({"train.lr": 0.5})
    with pytest.raises(EvenloadError, match=r"train.steps and train.epochs say"):
        recipe.changed({"train.epochs": 2})
    instead = recipe.changed({"train.steps": None, "train.epochs": 2, "train.global_batch_size": None})
    assert (instead.train.epochs, instead.train.lr) == (2, 0.5)
    assert instead.changed({"train.global_batch_tokens": 99}).train.global_batch_tokens == 99


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ({"train": {"freeze": ["*"]}, "parallel": {"ep": 2}}, "train.freeze does not go with experts"),
        ({"checkpoint": {"background": True}}, "are written in the foreground"),
    ],
)
def test_what_deepspeed_cannot_do_with_frozen_weights_and_checkpoints_is_refused(recipe, what):
    model = {"family": "mixtral", "moe": {"num_experts": 4}}
    with pytest.raises(EvenloadError, match=what):
        recipes.parse({"trainer": "deepspeed", "model": model, **recipe})
