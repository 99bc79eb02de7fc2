"""`python-stdlib`: the sources of the running Python's standard library, bytes as tokens where no tokenizer is named.

On every machine that can run evenload, nothing to download, and heavy-tailed like real text. The same Python release
gives the same documents; another one gives others.
"""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import cached_file, key_of
from .documents import Documents, changed

NAME = "python-stdlib"

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Not the library itself; some distributions leave its tests out, so they are left out everywhere."""


class StdlibDocuments(Documents):
    """One document per ``.py`` file, sorted by path."""

    name = NAME
    vocab_size: int | None = 256

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._paths = _python_files(self._root)
        self.lengths = np.array([(self._root / path).stat().st_size for path in self._paths], dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        tokens = np.fromfile(self._root / self._paths[document], dtype=np.uint8, count=stop - start, offset=start)
        if len(tokens) != stop - start:
            raise changed(self.where(document))
        return tokens

    def where(self, document: int) -> str:
        return str(self._root / self._paths[document])


def as_jsonl() -> Path:
    """The documents of the standard library as JSON Lines in the cache, for tokenizers."""
    files = library_files()

    def write(aside: Path) -> None:
        with open(aside, "w", encoding="utf-8") as stream:
            for path in files:
                stream.write(json.dumps({"text": path.read_text("utf-8", "replace")}) + "\n")

    return cached_file(key_of(files, "stdlib-1"), ".jsonl", write)


def library_files() -> list[Path]:
    """The library's ``.py`` files, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / path for path in _python_files(root)]


def library_files_by_top() -> list[tuple[str, Path]]:
    """The files of `library_files`, each with the name of the top-level package or module that it belongs to."""
    root = Path(sysconfig.get_path("stdlib"))
    return [(Path(path).parts[0].removesuffix(".py"), root / path) for path in _python_files(root)]


def _python_files(root: Path) -> list[str]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
