"""`python-docstrings`: instruction pairs of the running Python's standard library.

The prompt is the signature of a function or the head of a class, the completion the first paragraph of its docstring.
On every machine that can run evenload, some 8,000 pairs, as heavy-tailed as they come. The same Python release gives
the same pairs. Every tenth module is held out for validation: its pairs are `python-docstrings-held-out`.

`python-docstrings/asyncio` are the pairs of one package or module, for data sets of several owners; of them every tenth
pair is held out, as `python-docstrings-held-out/asyncio`.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ...core.errors import EvenloadError, nearest, shorten
from ..cache import cached_file, key_of
from ..stdlib import library_files, library_files_by_top

NAME, HELD_OUT = "python-docstrings", "python-docstrings-held-out"
_SHARE = 10
"""Of so many modules one is held out."""

_Item = TypeVar("_Item")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_pairs(spec: str) -> bool:
    """Whether a spec means pairs of the library, or of a package of it."""
    return spec.partition("/")[0] in (NAME, HELD_OUT)


def as_jsonl(spec: str) -> Path:
    """The pairs of a set as JSON Lines in the cache, in the order of the library's files; made once. Raises
    EvenloadError for a package that the library lacks, or one without pairs."""
    name, _, package = spec.partition("/")
    files = _files_of(package) if package else _split(library_files(), name)

    def pairs() -> list[tuple[str, str]]:
        each = [pair for path in files for pair in pairs_of(path.read_bytes())]
        return _split(each, name) if package else each

    if package and not (rows := pairs()):
        raise EvenloadError(f"{spec} has no pairs", f"{len(files)} files", "name a package with docstrings")

    def write(aside: Path) -> None:
        with open(aside, "w", encoding="utf-8") as stream:
            for prompt, completion in rows if package else pairs():
                stream.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

    return cached_file(key_of(files, "docstrings-2", *([spec] if package else [])), ".jsonl", write)


def _split(items: list[_Item], name: str) -> list[_Item]:
    """Every tenth of them, or all but those."""
    return [item for number, item in enumerate(items, 1) if (number % _SHARE == 0) == (name == HELD_OUT)]


def _files_of(package: str) -> list[Path]:
    tops: dict[str, list[Path]] = {}
    for top, path in library_files_by_top():
        tops.setdefault(top, []).append(path)
    if package not in tops:
        what = f"Python's library has no package {shorten(package)}"
        raise EvenloadError(what, f"{NAME}/{shorten(package)}", nearest(package, [t for t in tops if t[0] != "_"]))
    return tops[package]


def pairs_of(source: bytes) -> Iterator[tuple[str, str]]:
    """Prompt and completion of each documented definition of a module, first to last; none where it is no Python."""
    if b'"""' not in source and b"'''" not in source:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that later releases refuse
        try:
            module = ast.parse(source)
        except (SyntaxError, ValueError):
            return
    for node in _definitions(module):
        paragraph = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        if paragraph:
            yield f"{_head(node)}\n", paragraph


def _definitions(tree: ast.Module | _Definition) -> Iterator[_Definition]:
    for node in tree.body:
        if isinstance(node, _Definition):
            yield node
            yield from _definitions(node)


def _head(node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}:"
