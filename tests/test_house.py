"""What every module of the product keeps: names that stand once, docstrings that explain, rooms that mind their own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("commands", "core", "data", "integrations", "patches", "plugins", "runtime", "training")
MODULES = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])


def test_attributes_of_one_meaning_each_are_assigned_one_a_line() -> None:
    """A tuple of three names and one of three values make a reader count places."""
    wide = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple) and sum(isinstance(one, ast.Attribute) for one in target.elts) > 2
    ]
    assert wide == []


def test_the_executor_is_called_at_one_place_of_integrations() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("integrations/**/*.py")}
    assert {name: text.count("Executor(") for name, text in texts.items() if "Executor(" in text} == {
        "integrations/host/step.py": 1
    }


def test_no_integration_asks_for_a_plugin_by_its_name() -> None:
    """What it must know of a plugin, the plugin declares (`core.registry.Plugin`)."""
    names = {path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py")}
    assert len(names) > 4
    allowed = {("ds_config.py", "pipeline"), ("experts.py", "moe"), ("models.py", "moe")}  # keys of others
    asked = {
        (path.name, node.value)
        for path in (ROOT / "integrations").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert asked - allowed == set()


def test_training_prints_and_draws_nothing() -> None:
    """It returns data, logs, and tells of its progress; commands draw."""
    drawing = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())) if ROOT / "training" in path.parents else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.id] if isinstance(node, ast.Name) else []
            used = {name.partition(".")[0] for name in names} & {"rich", "typer", "print", "Console"}
            drawing += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in used]  # type: ignore[attr-defined]
    assert drawing == []


BACKWARD = re.compile(r"(Of|The same|Those|That|Likewise)\b")
"""How a docstring begins that leans on another text."""
FEWEST_WORDS = 5


def thin_docstrings(tree: ast.AST) -> list[str]:
    """Names of functions and classes whose docstring needs another text to be read, or only repeats the name."""
    named = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    texts = ((node.name, ast.get_docstring(node)) for node in named)
    return [name for name, text in texts if text and (BACKWARD.match(text) or len(text.split()) < FEWEST_WORDS)]


def test_every_docstring_says_what_a_thing_is() -> None:
    """In commands/verbs they are the help of the command line."""
    modules = [path for path in MODULES if ROOT / "commands" / "verbs" not in path.parents]
    thin = {str(path.relative_to(ROOT)): thin_docstrings(ast.parse(path.read_text())) for path in modules}
    assert {path: names for path, names in thin.items() if names} == {}


def test_a_thin_docstring_is_noticed() -> None:
    texts = (
        "Of a rank with so many weights.",
        "The same of another model here.",
        "Values of one head.",
        "What a plan is for.",
    )
    code = "\n".join(f'def f{i}():\n    """{text}"""' for i, text in enumerate(texts))
    assert thin_docstrings(ast.parse(code)) == ["f0", "f1", "f2"]


TWICE = {
    "Event": "torch.cuda's, which Megatron calls where there is no GPU",
    "PlainModel": "every trainer's module has one, by this name",
    "Planner": "the recipe's section is named by its key",
}
"""Class names that several modules may give, and why."""


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in TWICE:
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


MOST_METHODS = {"Host": 26}
"""Of a class in core and integrations that may have more than 20: what a trainer is asked for stands in one place."""


def test_no_class_does_everything() -> None:
    asked = [path for path in MODULES if path.relative_to(ROOT).parts[0] in ("core", "integrations")]
    nodes = [node for path in asked for node in ast.walk(ast.parse(path.read_text()))]
    classes = [(node.name, node.body) for node in nodes if isinstance(node, ast.ClassDef)]
    counts = {name: sum(isinstance(row, ast.FunctionDef) for row in body) for name, body in classes}
    assert {name: count for name, count in counts.items() if count > MOST_METHODS.get(name, 20)} == {}


def test_commands_and_training_ask_the_row_of_a_trainer() -> None:
    """None of them knows one by its name (`core.recipe.traits.TRAINERS`)."""
    names = {"megatron", "deepspeed", "transformers"}
    asking = [path for path in MODULES if path.relative_to(ROOT).parts[0] in ("commands", "training")]
    naming = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*asking, ROOT / "patches" / "session.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert naming == []


def test_no_host_has_a_method_for_what_it_lacks() -> None:
    paths = [*(ROOT / "integrations" / "host").glob("*.py"), ROOT / "integrations" / "deepspeed" / "tenants.py"]
    texts = [path.read_text() for path in paths]
    assert not any("raise AssertionError" in text or "raise NotImplementedError" in text for text in texts)
