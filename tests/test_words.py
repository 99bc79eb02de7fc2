"""The words of the project: docs/concept.md names what exists, and no name in the code says nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import evenload
import pytest

ROOT = Path(evenload.__file__).parent
_SECTION = (ROOT / "docs" / "concept.md").read_text().partition("\n## Words\n")[2]
_LINES = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", _SECTION, re.MULTILINE)
ROWS = [row for row in _LINES if row[0] != "word" and not row[0].startswith("--")]

EMPTY = {"found", "made", "mine", "told", "bare", "given", "way", "ways", "room"}
"""Names that say nothing of what they name."""
ALLOWED = {("core/errors.py", "found")}
"""``EvenloadError.found`` is the second part of every message and belongs to the public surface."""


def sources() -> list[Path]:
    """Product code and benchmarks, as paths under the root."""
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    skipped = ("tests", "build", "docs")
    return sorted(p for p in files if not p.parts[0].startswith(".") and p.parts[0] not in skipped)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that the code itself gives, with its line: variables, parameters, functions, classes, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def empty_names(path: Path) -> list[str]:
    tree = ast.parse((ROOT / path).read_text())
    lines = {(line, name) for name, line in names_in(tree) if name.strip("_") in EMPTY}
    return [f"{path}:{line} {name}" for line, name in sorted(lines) if (path.as_posix(), name) not in ALLOWED]


def test_every_name_says_what_it_names() -> None:
    assert len(sources()) > 200
    assert not [line for path in sources() for line in empty_names(path)]


def test_an_empty_name_is_noticed() -> None:
    code = "def way(mine, *, told):\n    self.room = [made for made in mine]\n    with x as (bare, b): found: int = 1"
    assert {name for name, _ in names_in(ast.parse(code))} & EMPTY == EMPTY - {"given", "ways"}


@pytest.mark.parametrize("name", [name for _, _, cell in ROWS for name in re.findall(r"`([\w.]+)`", cell)])
def test_a_name_in_the_table_exists(name: str) -> None:
    """Below ``evenload``: a module, a name in one, or an attribute of such a name."""
    *modules, last = name.split(".")
    for depth in range(len(modules), -1, -1):
        try:
            value = import_module(".".join(["evenload", *modules[:depth]]))
        except ModuleNotFoundError:
            continue
        for attribute in modules[depth:]:
            value = getattr(value, attribute)
        break
    is_module = hasattr(value, "__path__") and find_spec(f"{value.__name__}.{last}") is not None
    known = {*dir(value), *getattr(value, "__annotations__", ()), *getattr(value, "model_fields", ())}
    assert is_module or last in known, name


def test_the_table_explains_each_word_once() -> None:
    words = [word.strip() for cell, _, _ in ROWS for word in cell.split(",")]
    assert 30 < len(ROWS) <= 45
    assert len(set(words)) == len(words), sorted({word for word in words if words.count(word) > 1})
