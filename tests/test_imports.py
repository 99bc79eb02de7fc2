"""Who imports whom: no module imports itself in a circle, also not for its types alone."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from harness.lazy import TOO_SOON
from harness.product import ROOT, trees


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Every module of the house with the modules that it imports, those under ``TYPE_CHECKING`` among them."""
    graph = grimp.build_graph("evenload", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_module_imports_itself_in_a_circle(imports: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("a circle: " + " <- ".join(error.args[1]))


def test_imports_for_types_are_counted(imports: dict[str, set[str]]) -> None:
    """Else a circle among them would be passed over: a package names what it loads later for type checkers alone."""
    assert "evenload.core.simulate.step" in imports["evenload.core.simulate"]


OF_TRAINERS = {
    "megatron": {"megatron"},
    "deepspeed": {"deepspeed", "transformers"},
    "huggingface": {"transformers", "accelerate", "tokenizers"},
    "transformers": {"transformers", "accelerate"},
}
"""Packages that a room of integrations may count on, beside those of every installation, torch and pydantic's core."""
PACKAGES = {"PyYAML": "yaml", "megatron-core": "megatron"}


def imported_at_once(tree: ast.Module) -> set[str]:
    """Packages that a module imports as soon as it is imported itself."""
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"evenload"}


def test_no_module_needs_a_package_that_its_users_need_not_have() -> None:
    """Else a command ends in a traceback of an import where only the base and a trainer are installed."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    base = {PACKAGES.get(re.split(r"[<>=]", line)[0], re.split(r"[<>=]", line)[0]) for line in lines}
    wrong = {}
    for path, tree in trees().items():
        room, *below = Path(path).parts
        of_trainer = OF_TRAINERS.get(below[0], set()) if room == "integrations" else set()
        if more := imported_at_once(tree) - base - of_trainer - {"torch", "pydantic_core"}:
            wrong[path] = sorted(more)
    assert len(trees()) > 300
    assert wrong == {}


def test_collecting_tests_imports_no_trainer() -> None:
    """Everybody waits for it, whatever they run: `harness.lazy` is for what a test file needs when it runs."""
    assert TOO_SOON == {}
