"""The built-in sets: the running Python's standard library, as its sources or as instruction pairs.

On every machine that can run evenload, nothing to download, and heavy-tailed like real text. The same Python release
gives the same documents; another one gives others.

`python-stdlib` are the sources, bytes as tokens where no tokenizer is named. `python-docstrings` are some 8,000 pairs:
the prompt is the signature of a function or the head of a class, the completion the first paragraph of its docstring.
Every tenth module is held out for validation: its pairs are `python-docstrings-held-out`. `python-docstrings/asyncio`
are the pairs of one package or module, for data sets of several owners; of them every tenth pair is held out, as
`python-docstrings-held-out/asyncio`. `python-stdlib/asyncio` are the sources of one package or module.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, nearest, shorten
from .cache import cached_file, key_of
from .documents import Documents, changed

NAME, PAIRS, HELD_OUT = "python-stdlib", "python-docstrings", "python-docstrings-held-out"

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Not the library itself; some distributions leave its tests out, so they are left out everywhere."""
_SHARE = 10
"""Of so many modules one is held out."""

_Item = TypeVar("_Item")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class StdlibDocuments(Documents):
    """One document per ``.py`` file, sorted by path."""

    vocab_size: int | None = 256

    def __init__(self, spec: str = NAME) -> None:
        self.name = spec
        self._files = _files_of(spec)
        self.lengths = np.array([path.stat().st_size for path in self._files], dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        tokens = np.fromfile(self._files[document], dtype=np.uint8, count=stop - start, offset=start)
        if len(tokens) != stop - start:
            raise changed(self.where(document))
        return tokens

    def where(self, document: int) -> str:
        return str(self._files[document])


def is_sources(spec: str) -> bool:
    """Whether a spec means the sources of the library, or of a package of it."""
    return spec.partition("/")[0] == NAME


def sources_as_jsonl(spec: str = NAME) -> Path:
    """The documents of the standard library, or of a package, as JSON Lines in the cache, for tokenizers."""
    files = _files_of(spec)
    return _as_jsonl(key_of(files, "stdlib-1"), ({"text": path.read_text("utf-8", "replace")} for path in files))


def is_pairs(spec: str) -> bool:
    """Whether a spec means pairs of the library, or of a package of it."""
    return spec.partition("/")[0] in (PAIRS, HELD_OUT)


def pairs_as_jsonl(spec: str) -> Path:
    """The pairs of a set as JSON Lines in the cache, in the order of the library's files; made once. Raises
    EvenloadError for a package that the library lacks, or one without pairs."""
    name, _, package = spec.partition("/")
    files = _files_of(spec) if package else _split(_files(), name)
    pairs: Iterable[dict[str, str]] = (pair for path in files for pair in pairs_of(path.read_bytes()))
    if package and not (pairs := _split(list(pairs), name)):
        raise EvenloadError(f"{spec} has no pairs", f"{len(files)} files", "name a package with docstrings")
    return _as_jsonl(key_of(files, "docstrings-2", *([spec] if package else [])), pairs)


def pairs_of(source: bytes) -> Iterator[dict[str, str]]:
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
            yield {"prompt": f"{_head(node)}\n", "completion": paragraph}


def _as_jsonl(key: str, rows: Iterable[dict[str, str]]) -> Path:
    def write(aside: Path) -> None:
        with open(aside, "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)

    return cached_file(key, ".jsonl", write)


def _files() -> list[Path]:
    """The library's ``.py`` files, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _files_of(spec: str) -> list[Path]:
    """The files that a spec names, those of a package or all. Raises EvenloadError for a package that is not there."""
    package = spec.partition("/")[2]
    if not package:
        return _files()
    root = Path(sysconfig.get_path("stdlib"))
    tops: dict[str, list[Path]] = {}
    for path in _files():
        tops.setdefault(path.relative_to(root).parts[0].removesuffix(".py"), []).append(path)
    if package not in tops:
        what = f"Python's library has no package {shorten(package)}"
        raise EvenloadError(what, shorten(spec), nearest(package, [t for t in tops if t[0] != "_"]))
    return tops[package]


def _split(items: list[_Item], name: str) -> list[_Item]:
    """Every tenth of them, or all but those."""
    return [item for number, item in enumerate(items, 1) if (number % _SHARE == 0) == (name == HELD_OUT)]


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
