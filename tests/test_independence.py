"""Any plugin can be taken away: the rest imports, and a recipe that names it says so."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from harness import without as harness

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py"))
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
VERBS = {"audit": {"audit"}, "data": {"score"}, "lora": {"lora"}, "rollout": {"generate"}, "search": {"search"}}
VERBS |= {"verdicts": {"compare"}}
OF_NO_RECIPE = {"audit", "report", "rollout", "search", "verdicts"}
"""Plugins that recipes do not name."""
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import evenload.cli
from evenload import EvenloadError, load_recipe, plan
from evenload.core.registry import registered
from evenload.core.verbs import VERBS
from evenload.training.files import refuse_pictures
names, refused, planned = [], {}, []
for path in sorted((Path(sys.argv[1]) / "evenload" / "recipes").glob("*.yaml")):
    try:
        recipe = load_recipe(path)
    except EvenloadError as error:
        refused[path.stem] = str(error)
    else:
        if not recipe.adapts and recipe.parallel.pp == 1:
            planned.append(len(plan(recipe, [7, 5, 30, 4, 9, 12, 3, 40] * 8).micro_batches))
undrawn = {}
for option in "trace", "plot", "report":
    try:
        refuse_pictures(**{option: Path("picture.txt")})
    except EvenloadError as error:
        undrawn[option] = str(error)
assert evenload.__file__.startswith(sys.argv[1]), evenload.__file__
print(json.dumps([[p.name for p in registered()], sorted(VERBS.registered()), refused, planned, undrawn]))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What the tree says without a folder of plugins: names of plugins and verbs, refused recipes, sizes of plans,
    refused pictures."""

    def say(name):
        top = tmp_path_factory.mktemp("tree")
        (top / "evenload" / "plugins").mkdir(parents=True)
        for folder, left_out in (ROOT, ".git"), (ROOT / "plugins", name):
            for path in folder.iterdir():
                if path.name not in (left_out, "plugins", "__pycache__") and not path.name.startswith("."):
                    (top / "evenload" / folder.relative_to(ROOT) / path.name).symlink_to(path)
        command = [sys.executable, "-c", CHILD, str(top)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, cwd=top)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return say


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_the_rest_works_without_a_plugin(without, name):
    plugins, verbs, refused, planned, undrawn = without(name)
    assert name not in plugins
    assert set(plugins) | {name, *OF_NO_RECIPE} == {*PLUGINS}
    assert not VERBS.get(name, set()) & set(verbs)
    assert set().union(*VERBS.values()) - set(verbs) == VERBS.get(name, set())
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "recipes").glob("*.yaml")}
    assert refused.keys() == {stem for stem, recipe in recipes.items() if name in recipe.get("plugins", {})}
    for said in refused.values():
        assert f"plugins has no key '{name}'" in said
        assert "any other must be installed" in said
    assert min(planned) > 0
    nobody_draws = {option for option, said in undrawn.items() if f"nobody draws what --{option} asks for" in said}
    assert nobody_draws == ({"plot", "report"} if name == "report" else set())


@pytest.mark.parametrize("name", PLUGINS)
def test_a_copy_lacks_the_plugin_its_tests_and_its_rows(name, tmp_path):
    code = harness.copy_without(name, tmp_path)
    assert not [*code.glob(f"plugins/{name}"), *code.glob(f"tests/plugins/{name}")]
    text = (code / "pyproject.toml").read_text()
    assert not re.search(rf"evenload\.plugins\.{name}\b", text)
    of_others = {row for row in PACKAGES if f".plugins.{name}" not in row}
    assert set(tomllib.loads(text)["tool"]["setuptools"]["packages"]) == of_others
    assert (code / "tests" / "plugins" / "chains.py").exists()


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("the recipe: plugins has no key 'mesh' ... any other must be installed", "skipped"),
        ("ModuleNotFoundError: No module named 'evenload.plugins.mesh.plan'", "skipped"),
        ("not ['docs/mesh.md', 'plugins/mesh/plan.py']", "skipped"),
        ("No such command 'mesh'.", "skipped"),
        ("AttributeError: module 'evenload.plugins' has no attribute 'mesh'", "skipped"),
        ("AttributeError: 'Plugins' object has no attribute 'mesh'", "failed"),
        ("ModuleNotFoundError: No module named 'evenload.plugins.meshes'", "failed"),
        ("assert plugins.mesh == 1", "failed"),
    ],
)
def test_a_test_that_asks_for_an_absent_plugin_is_skipped_and_no_other(text, outcome):
    report = SimpleNamespace(failed=True, outcome="failed", longreprtext=text, sections=[], fspath="x", longrepr="")
    assert harness.judged(report, "mesh").outcome == outcome
    assert harness.judged(SimpleNamespace(failed=True, outcome="failed"), "").outcome == "failed"


def test_no_room_of_the_host_names_a_module_of_a_plugin():
    rooms = ("cli.py", "api.py", "commands", "core", "data", "integrations", "patches", "runtime", "training")
    files = [path for room in rooms for path in (ROOT / room, *(ROOT / room).rglob("*.py")) if path.is_file()]
    assert len(files) > 300
    assert not [str(path) for path in files for name in PLUGINS if f"evenload.plugins.{name}." in path.read_text()]
