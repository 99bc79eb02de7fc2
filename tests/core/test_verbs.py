"""Verbs are rows: those of another package are listed, run and refused as evenload's own are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evenload.commands.tables.show import of_plugins
from evenload.core import verbs
from evenload.core.errors import EvenloadError
from evenload.core.function_rows import FunctionRows
from evenload.core.verbs import VERBS, Verb
from harness.commands import Commands
from harness.without import needs

GREETING = '''
from typing import Annotated
import typer
from evenload import EvenloadError

def greet(name: str, loud: Annotated[bool, typer.Option("--loud", help="In capitals.")] = False) -> None:
    """Greet somebody by name."""
    if name == "nobody":
        raise EvenloadError("nobody cannot be greeted", name, "name somebody")
    print(f"Hello {name}".upper() if loud else f"Hello {name}")
'''
ROWS = "greet = greeting:greet\nbroken = no_such_module_of_theirs:verb\n"
PLANNER = """
from evenload import PluginConfig, StepPlugin, register

def plan(plan, context, config):
    return plan.revised(notes=(*plan.notes, "planned by theirs"))

register(StepPlugin(name="theirs", summary="", papers=(), stage=50, config=PluginConfig, plan=plan))
"""
HOOK = """
from evenload.training.step_hooks import StepHook

class Seen(StepHook):
    key = "seen"
    anew = "steps are seen anew"

    def __init__(self):
        self.steps = []

    def after(self, planner, step):
        self.steps.append([step.number, "planned by theirs" in step.planned.plan.notes])

    def state(self, planner):
        return {"steps": self.steps}

    def restore(self, saved):
        self.steps = saved["steps"]

    def report(self, train_s):
        return {"seen": self.steps}

def hooks(run):
    yield Seen()
"""
WHOLE = f"""{ROWS}
[evenload.plugins]
theirs = their_planner

[evenload.run_hooks]
seen = their_hook:hooks
"""
RECIPE = """
trainer: megatron
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {source: rows.jsonl, max_length: 64}
train: {steps: 2, global_batch_size: 4}
checkpoint: {dir: kept}
plugins: {packing: {enabled: true, max_tokens: 256}, theirs: {enabled: true}}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Callable[[str], Commands]]:
    """``installed(rows)``: the command where another package is installed that has these entry points."""
    site, begun = tmp_path / "site", []

    def install(rows: str) -> Commands:
        information = site / "greeting-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[{VERBS.group}]\n{rows}")
        for name, text in (("greeting", GREETING), ("their_planner", PLANNER), ("their_hook", HOOK)):
            (site / f"{name}.py").write_text(text)
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        begun.append(Commands(environment={"PYTHONPATH": path}))
        return begun[-1]

    yield install
    for commands in begun:
        commands.close()


def test_a_verb_of_another_package_is_listed_and_runs(installed, tmp_path):
    command = installed(ROWS)
    listed = command(tmp_path, "--help").stdout
    order = [listed.index(f" {name} ") for name in ("schema", "broken", "greet")]
    assert order == sorted(order), "after evenload's own"
    assert "Greet somebody by name." in listed
    assert "In capitals." in command(tmp_path, "greet", "--help").stdout
    assert command(tmp_path, "greet", "Ada", "--loud").stdout == "HELLO ADA\n"
    refused = command(tmp_path, "greet", "nobody")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (2, "evenload: nobody cannot be greeted")


def test_a_verb_that_cannot_be_imported_says_so_and_stops_no_other(installed, tmp_path):
    command = installed(ROWS)
    done = command(tmp_path, "broken", "word", "--option")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the verb 'broken' cannot be imported" in done.stderr
    assert "no_such_module_of_theirs:verb: ModuleNotFoundError" in done.stderr
    assert command(tmp_path, "recipes", "--json").returncode == 0


OF_LORA = pytest.param("lora", "plugins.lora.verb", marks=needs("lora"))


@pytest.mark.parametrize(("name", "module"), [("plan", "commands.verbs.forecast"), OF_LORA])
def test_a_name_that_is_taken_shows_both_sides(name, module, installed, tmp_path):
    """Also where the other one is of a plugin, and whoever of the two is asked for."""
    command = installed(f"{name} = greeting:greet\n")
    for words in ((name, "Ada"), ("plan", "quickstart"), ("--help",)):
        done = command(tmp_path, *words)
        assert done.returncode == 2
        assert f"two verbs are called '{name}'" in done.stderr
        assert "greeting:greet" in done.stderr
        assert f"evenload.{module}:{name}" in done.stderr


@pytest.mark.slow
def test_another_package_brings_a_planner_a_verb_and_a_hook_of_runs(installed, tmp_path):
    """The hook sees every step of the planner; what it keeps comes back in a run that goes on."""
    command = installed(WHOLE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [{"input_ids": list(range(2 + 5 * i % 40))} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert command(tmp_path, "greet", "Ada").stdout == "Hello Ada\n"
    seen = []
    for steps in (2, 3):
        done = command(tmp_path, "train", "recipe.yaml", f"train.steps={steps}", "--nproc", "1", "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "anew" not in done.stderr
        seen.append(json.loads(done.stdout)["policies"]["seen"])
    assert seen == [[[0, True], [1, True]], [[0, True], [1, True], [2, True]]]


def test_a_row_is_registered_once():
    verbs = FunctionRows("verb", Verb)
    row = Verb("greet", "greeting:greet")
    assert verbs.register(row) is verbs.register(row) is row
    assert verbs.register(Verb("first", "greeting:first", order=1))
    assert list(verbs.registered()) == ["first", "greet"]
    with pytest.raises(EvenloadError, match="two verbs are called 'greet'"):
        verbs.register(Verb("greet", "other:greet"))


WITHOUT_TWO_FOLDERS = """
import pkgutil
walk = pkgutil.iter_modules
pkgutil.iter_modules = lambda *path: (one for one in walk(*path) if one.name not in ("data", "lora"))
"""


def test_a_verb_goes_with_the_folder_of_its_plugin(tmp_path):
    command = Commands(WITHOUT_TWO_FOLDERS)
    listed, asked = command(tmp_path, "--help").stdout, command(tmp_path, "lora", "out")
    command.close()
    assert " watch " in listed
    assert [name for name in ("lora", "score") if f" {name} " in listed] == []
    assert asked.returncode == 2
    assert "No such command 'lora'" in asked.stderr


def test_a_plugin_shows_its_part_of_a_result(monkeypatch, shown):
    monkeypatch.setattr(verbs, "_tables", {})
    monkeypatch.setattr(verbs, "resolve_name", {"mine:tables": lambda result: [_own(result)]}.get)
    verbs.register_tables("plan", "mine", "mine:tables")
    verbs.register_tables("plan", "mine", "mine:tables")
    (table,) = of_plugins("plan", {"mine": 7.25, "other": 1})
    assert "7.25" in shown(table)
    assert not of_plugins("plan", {"other": 1})
    assert not of_plugins("train", {"mine": 7.25})
    with pytest.raises(EvenloadError, match="two plugins show 'mine' of 'plan'"):
        verbs.register_tables("plan", "mine", "other:tables")


def _own(result):
    return verbs.ResultTable("own", ("", ""), [("a", result["mine"])])
