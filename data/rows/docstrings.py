"""`python-docstrings`: instruction pairs of the running Python's standard library.

The prompt is the signature of a function or the head of a class, the completion the first paragraph of its docstring.
On every machine that can run evenload, some 8,000 pairs, as heavy-tailed as they come. The same Python release gives
the same pairs. Every tenth module is held out for validation: its pairs are `python-docstrings-held-out`.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..cache import cached_file, key_of
from ..stdlib import library_files

NAME, HELD_OUT = "python-docstrings", "python-docstrings-held-out"
_SHARE = 10
"""Of so many modules one is held out."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def as_jsonl(name: str) -> Path:
    """The pairs of a set as JSON Lines in the cache, in the order of the library's files; made once."""
    files = [path for number, path in enumerate(library_files(), 1) if (number % _SHARE == 0) == (name == HELD_OUT)]

    def write(aside: Path) -> None:
        with open(aside, "w", encoding="utf-8") as stream:
            for path in files:
                for prompt, completion in pairs_of(path.read_bytes()):
                    stream.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

    return cached_file(key_of(files, "docstrings-2"), ".jsonl", write)


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
    """Those of a body and of what is defined in it."""
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
