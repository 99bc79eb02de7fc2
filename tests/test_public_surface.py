"""The public surface against a list taken from an earlier version: nothing is gone, additions are free.

``public_surface.json`` holds the commands with their options, the keys of a recipe, of plan.json and of every
``--json``, and the Python names. ``python tests/test_public_surface.py`` prints it for the evenload that is on the
path; ``written_before/`` holds recipes, a plan.json and a checkpoint's manifest that the same earlier version wrote.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command

HERE = Path(__file__).parent
EARLIER = json.loads((HERE / "public_surface.json").read_text()) if (HERE / "public_surface.json").exists() else {}
WRITTEN = HERE / "written_before"

RENAMED = {
    "StepPlan(sequences)": "StepPlan(lengths)",
    "MicroBatch(engine)": "MicroBatch(cp_comm)",
    "MicroBatch(inner)": "MicroBatch(ulysses_degree)",
    "MicroBatch(homes)": "MicroBatch(cp_groups)",
    "MicroBatch.engine": "MicroBatch.cp_comm",
    "MicroBatch.inner": "MicroBatch.ulysses_degree",
    "MicroBatch.homes": "MicroBatch.cp_groups",
    "MicroBatch.num_slots": "MicroBatch.num_padded_tokens",
    "StepPlan.num_slots": "StepPlan.num_padded_tokens",
    "Session.lives": "Session.active",
    "StepPlan.check": "evenload.core.laws:check",
    "StepPlan.to_json": "evenload.core.plan_json:step_json",
    "StepPlan.from_json": "evenload.core.plan_json:read_step",
}
"""What goes by another name since then, or is a function now (module:name)."""

PURE = """
trainer: megatron
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 4096}
train: {global_batch_size: 12, micro_batch_size: 2}
plugins:
  packing: {enabled: true, max_tokens: 1024}
  mesh: {enabled: true}
  pipeline: {enabled: true, max_tokens: 1024}
"""
RUNS = """
trainer: megatron
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 128, long_samples: truncate}
parallel: {dp: 2}
train: {steps: 2, global_batch_size: 4}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""
LENGTHS = (3000, 900, 700, 650, 400, 300, 200, 120, 90, 60, 40, 20)
VERBS = {"train": ("--against", "stock"), "verify": ("--steps", "2"), "bench": ("--against", "stock")}


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a JSON value by its path; ``[]`` is any element of a list."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield f"{prefix}.{key}".lstrip(".")
            yield from paths(below, f"{prefix}.{key}")
    elif isinstance(value, list):
        for below in value:
            yield from paths(below, f"{prefix}[]")


def keys(text: str) -> list[str]:
    return sorted(set(paths(json.loads(text))))


def recipe_keys() -> dict[str, list[Any]]:
    """Every key of a recipe with the words that it takes, if they are a list."""
    from evenload.api import load_plugins
    from evenload.core.recipe.recipe import json_schema

    load_plugins()
    schema = json_schema()
    rows: dict[str, list[Any]] = {}

    def walk(node: dict[str, Any], prefix: str) -> list[Any]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        words = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
        for branch in [*node.get("anyOf", ()), *node.get("allOf", ()), *([node["items"]] if "items" in node else ())]:
            words += walk(branch, prefix)
        for name, below in node.get("properties", {}).items():
            path = f"{prefix}.{name}".lstrip(".")
            rows[path] = walk(below, path)
        return words

    walk(schema, "")
    return rows


def commands() -> dict[str, list[str]]:
    import typer
    from evenload.cli import app

    group: Any = typer.main.get_command(app)
    return {
        name: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, command in group.commands.items()
    }


def python_names() -> dict[str, dict[str, Any]]:
    """Of each name of the package: its parameters in order, and its public attributes if it is a class."""
    import evenload

    rows = {}
    for name in evenload.__all__:
        value = getattr(evenload, name)
        parameters = list(inspect.signature(value).parameters) if callable(value) else []
        attributes: list[str] = []
        if inspect.isclass(value):
            fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
            own = [n for base in value.__mro__ if base.__module__.startswith("evenload") for n in vars(base)]
            attributes = sorted({n for n in (*fields, *own, *getattr(value, "model_fields", ())) if n[0] != "_"})
        rows[name] = {"parameters": parameters, "attributes": [n for n in attributes if n != "model_config"]}
    return rows


def output(place: Path, *words: str) -> str:
    done = command(place, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def planned_keys(place: Path) -> dict[str, list[str]]:
    """The keys of everything that can be asked for without training."""
    (place / "recipe.yaml").write_text(PURE)
    (place / "lengths.txt").write_text("".join(f"{n}\n" for n in LENGTHS))
    ask = ("plan", "recipe.yaml", "--lengths", "lengths.txt", "--json")
    cut = ("parallel.dp=2", "parallel.pp=2", "plugins.mesh.enabled=false")
    shared = ("parallel.dp=4", "plugins.pipeline.enabled=false")
    rows = {}
    for name, words in {"cut in stages": cut, "shared": shared}.items():
        rows[f"plan, {name}"] = keys(output(place, *ask, *words, "--out", "plan.json"))
        rows[f"plan.json, {name}"] = keys((place / "plan.json").read_text())
    rows["plan --sweep"] = keys(output(place, *ask, *shared, "--sweep", "train.global_batch_size=6,12"))
    rows |= {verb: keys(output(place, verb, "--json")) for verb in ("plugins", "doctor")}
    return rows


def gone(kind: str, before: Iterable[str], now: Iterable[str]) -> list[str]:
    return [f"{kind}: {name}" for name in before if name not in set(now)]


def renamed(owner: str, names: Iterable[str], form: str) -> list[str]:
    """Names of an earlier version as they are today; ``form`` is '.{}' for attributes and '({})' for parameters."""
    return [RENAMED.get(owner + form.format(n), owner + form.format(n)) for n in names]


def is_there(line: str) -> bool:
    """Whether a ``module:name`` can be imported."""
    module, _, name = line.partition(":")
    return hasattr(import_module(module), name)


def test_commands_and_options_are_all_there() -> None:
    now = commands()
    assert not gone("command", EARLIER["commands"], now)
    assert not [line for verb, options in EARLIER["commands"].items() for line in gone(verb, options, now[verb])]


@pytest.mark.every_plugin
def test_recipe_keys_and_their_words_are_all_there() -> None:
    now = recipe_keys()
    assert not gone("key", EARLIER["recipe"], now)
    assert not [line for key, words in EARLIER["recipe"].items() for line in gone(key, words, now[key])]


def test_python_names_are_all_there() -> None:
    now = python_names()
    assert not gone("name", EARLIER["python"], now)
    for owner, row in EARLIER["python"].items():
        parameters = [f"{owner}({n})" for n in now[owner]["parameters"]]
        asked = renamed(owner, row["parameters"], "({})")
        assert [n for n in parameters if n in asked] == asked, f"parameters of {owner} and their order"
        attributes = [f"{owner}.{n}" for n in now[owner]["attributes"]]
        asked = renamed(owner, row["attributes"], ".{}")
        assert not gone("attribute", [n for n in asked if ":" not in n], attributes)
        assert all(is_there(n) for n in asked if ":" in n)


@pytest.mark.slow
def test_names_that_documents_import_are_all_there() -> None:
    assert all(is_there(line) for line in EARLIER["imports"]), [n for n in EARLIER["imports"] if not is_there(n)]


@pytest.mark.slow
def test_what_can_be_asked_without_training_has_all_its_keys(tmp_path: Path) -> None:
    now = planned_keys(tmp_path)
    assert not [line for name in now for line in gone(name, EARLIER["json"][name], now[name])]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_results_of_training_have_all_their_keys(verb: str, tmp_path: Path, forged: Callable[..., Any]) -> None:
    (tmp_path / "recipe.yaml").write_text(RUNS)
    done = forged(tmp_path, verb, "recipe.yaml", *VERBS[verb], "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not gone(verb, EARLIER["json"][verb], keys(done.stdout))


@pytest.mark.parametrize("path", sorted(WRITTEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_earlier_recipe_loads(path: Path) -> None:
    from evenload import load_recipe

    assert load_recipe(path).plugins


def test_an_earlier_plan_is_read_and_written_again_as_it_was() -> None:
    from evenload.core.plan_json import read_plans, step_json

    written = json.loads((WRITTEN / "plan.json").read_text())["steps"]
    again = [step_json(plan) for plan in read_plans(WRITTEN / "plan.json")]
    for one in (*written, *again):
        del one["checksum"]  # of the text, where a whole number may be written with or without a fraction
    assert again == written, "also its digest"


def test_an_earlier_checkpoint_is_read() -> None:
    from evenload.training.checkpoint.manifest import read

    manifest = read(WRITTEN)
    assert manifest.state["step"] == 2
    assert len(manifest.files) > 2


def imports_of_documents(root: Path) -> list[str]:
    """``module:name`` of every import from evenload in the README and the documents."""
    lines = []
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for module, names in re.findall(r"^from (evenload[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE):
            lines += [f"{module}:{name.strip()}" for name in names.split(",")]
    return sorted(set(lines))


def surface(place: Path) -> dict[str, Any]:
    """The public surface of the evenload that is on the path."""
    import evenload
    from evenload.integrations import deepspeed, megatron

    rows = planned_keys(place)
    (place / "recipe.yaml").write_text(RUNS)
    rows |= {verb: keys(output(place, verb, "recipe.yaml", *VERBS[verb], "--json")) for verb in VERBS}
    hosts = [f"{host.__name__}:{name}" for host in (deepspeed, megatron) for name in host.__all__]
    imports = sorted({*imports_of_documents(Path(evenload.__file__).parent), *hosts})
    names = {"recipe": recipe_keys(), "python": python_names(), "imports": imports}
    return {"commands": commands(), **names, "json": rows}


if __name__ == "__main__":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(surface(Path(folder)), indent=1))
