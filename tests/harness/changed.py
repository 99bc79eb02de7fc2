"""``make test-changed``: the test files that a change can break, found by who imports what.

    python -m harness.changed [BASE]      prints them, one a line; BASE is the commit to compare with, HEAD by default

A test file depends on what it imports, on the other files of its folder and the conftests above it, and on all that
those import. Who starts commands, scripts or interpreters depends on all of the product. Changes to what is no Python
(recipes, documents, the Makefile) select the files that name its folder, those to conftest.py all below it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
STARTS_ANYTHING = ("forged", "scripted", "sys.executable", "CliRunner", "evenload.cli", "evenload.api", "import_module")
"""A test file that has one of these words can reach every module of the product."""


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print(*selected(changed_since(base)), sep="\n")


def changed_since(base: str) -> list[str]:
    """Paths below the root that differ from a commit, new ones too."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    listed = [subprocess.run(c, cwd=ROOT, capture_output=True, text=True, check=True).stdout for c in commands]
    return sorted({line for text in listed for line in text.splitlines()})


def selected(changed: Iterable[str]) -> list[str]:
    """The test files, by their paths below the root, that depend on one of these."""
    changed = list(changed)
    touched = downstream({module_of(Path(path)) for path in changed if path.endswith(".py")})
    words = [Path(path).parts[0] for path in changed if not path.endswith(".py")]
    return [
        str(file.relative_to(ROOT))
        for file in test_files()
        if needs_of(file) & touched
        or str(file.relative_to(ROOT)) in changed
        or any(word in _text(file) for word in words)
        or any((ROOT / path).parent in file.parents for path in changed if Path(path).name == "conftest.py")
    ]


def test_files() -> list[Path]:
    return sorted(file for file in TESTS.rglob("test_*.py"))


def module_of(path: Path) -> str:
    """The module of a path below the root: ``evenload.core.laws``, or of a test's own, ``tests/harness/world.py``."""
    if path.parts[0] == "tests":
        return str(path)
    parts = path.with_suffix("").parts
    return ".".join(("evenload", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def downstream(modules: set[str]) -> set[str]:
    """These modules and all that import them, directly or not."""
    reached, graph = set(modules), product()
    for module in modules & graph.modules:
        reached |= graph.find_downstream_modules(module)
    return reached


@cache
def product() -> grimp.ImportGraph:
    """Who imports whom in evenload, also inside functions."""
    return grimp.build_graph("evenload", cache_dir=None)


@cache
def needs_of(file: Path) -> frozenset[str]:
    """Modules of evenload that a test file imports, itself or by its helpers, and these helpers."""
    helpers = {helper for helper in file.parent.glob("*.py") if not helper.name.startswith("test_")}
    helpers |= {above / "conftest.py" for above in file.parents if TESTS in (above, *above.parents)}
    needs: set[str] = set()
    seen: set[Path] = set()
    waiting = [file, *(helper for helper in helpers if helper.exists())]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        needs.add(str(one.relative_to(ROOT)))
        for name in imported(one):
            if name.partition(".")[0] == "evenload":
                needs |= {name, name.rpartition(".")[0]}
            else:
                waiting += _files_of(name)
        if one == file and any(word in _text(file) for word in STARTS_ANYTHING):
            needs |= product().modules
    return frozenset(needs)


@cache
def imported(file: Path) -> list[str]:
    """Names that a file imports, anywhere in it, those from a module with it; relative ones from the top of tests/."""
    own, names = file.relative_to(TESTS).with_suffix("").parts, []
    for node in ast.walk(ast.parse(_text(file))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = own[: len(own) - node.level] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "LazyModule":
            names.append(ast.literal_eval(node.args[0]))
    return names


def _files_of(name: str) -> list[Path]:
    """Files below tests/ that a module name means; the rooms of the trainers stand under names of their own."""
    for short in ("megatron", "deepspeed"):
        name = name.replace(f"{short}_tests", f"integrations.{short}", 1)
    place = TESTS / name.replace(".", "/")
    return [one for one in (place.with_suffix(".py"), place / "__init__.py") if one.exists()]


@cache
def _text(file: Path) -> str:
    return file.read_text()


if __name__ == "__main__":
    main()
