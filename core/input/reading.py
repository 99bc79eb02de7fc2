"""The one door for files and values that a user gives: everything that is opened or parsed for them comes through here.

Only regular files are opened, and no more of one is read than its kind can need: a pipe would be waited for, a device
has no end. Text is UTF-8. YAML holds what JSON holds (null, booleans, numbers, text, lists, mappings), nested to a
bounded depth; anchors are fine as long as what they stand for stays small when it is written out. Parsers raise what
they like on damaged input (PyYAML alone ValueError, IndexError, AttributeError, OverflowError, RecursionError), so
whatever they raise becomes one EvenloadError with at most `errors.SHOWN` characters of what was found.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ..errors import EvenloadError, shorten, shown

YAML_BYTES = 1 << 20
"""Of a recipe, a cluster, costs: a hundred times the longest that is shipped."""
JSON_BYTES = 1 << 26
"""Of a model's config.json, the list of files of a data set or a checkpoint."""
PLAN_BYTES = 1 << 32
"""Of plan.json: 60 bytes a slice."""

MOST_DEPTH = 50
"""Levels of a document: recipes need five, a ds_config ten."""
_MOST_VALUES = 20_000
"""Of a YAML document as it is written; Python takes a second for so many."""
_MOST_TEXT = 2 * YAML_BYTES
"""Characters of a YAML document with what its aliases stand for written out."""
_MOST_NAME = 4096
"""Characters of a path."""
_MOST_DIGITS = 100
"""Of a number; Python itself stops at 4,300."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file of that name; also for names that no file system can have."""
    return os.path.isfile(path)  # unlike Path.is_file, which raises for those


def file_name(path: Path) -> Path:
    """``path`` if a file system could have it; else ValueError, as pydantic's validators raise."""
    if "\0" in str(path) or len(str(path)) > _MOST_NAME:
        raise ValueError("no name of a file")
    return path


def open_file(path: str | Path, name: str, do: str) -> BinaryIO:
    """A regular file, opened for reading; ``name`` is that of messages (``the recipe r.yaml``), ``do`` their remedy.

    Raises EvenloadError where there is no such file, it is a folder, a pipe or a device, or it may not be read.
    """
    try:
        kind = stat.S_IFMT(os.stat(os.fspath(path)).st_mode)
        if kind == stat.S_IFREG:
            return open(path, "rb")
    except (OSError, ValueError, TypeError) as error:  # the latter: a name with a NUL or a lone surrogate, or no name
        raise _unreadable(name, error, do) from error
    raise EvenloadError(f"{name} cannot be read", f"{_KINDS.get(kind, 'no file')}, not a regular file", do)


def _unreadable(name: str, error: Exception, do: str) -> EvenloadError:
    detail = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return EvenloadError(f"{name} cannot be read", shorten(detail), do)


@contextmanager
def failures_of(name: str, do: str) -> Iterator[None]:
    """What the system raises while a file is read, as an EvenloadError."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise _unreadable(name, error, do) from error


def read_bytes(path: str | Path, most: int, name: str, do: str) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises EvenloadError."""
    with open_file(path, name, do) as file, failures_of(name, do):
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""  # what the kernel makes up on the way has no size
    if max(size, len(content)) > most:
        raise EvenloadError(f"{name} is too large", f"more than {most} bytes", do)
    return content


def read_yaml(path: str | Path, name: str, do: str) -> Any:
    """The document of a YAML file. Raises EvenloadError."""
    content = read_bytes(path, YAML_BYTES, name, do)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvenloadError(f"{name} is not YAML", shorten(f"no UTF-8: {error}"), "save it as UTF-8") from error
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str, do: str = "mend it, or quote what is text") -> Any:
    """The value that a text has as YAML. Raises EvenloadError."""
    try:
        return deepcopy(_document(text))
    except Exception as error:  # see the module
        raise EvenloadError(f"{name} is not YAML", shorten(str(error) or type(error).__name__), do) from error


@lru_cache(maxsize=16)
def _document(text: str) -> Any:
    """The value of a YAML text; a search over settings asks for the same files thousands of times."""
    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _refuse_large(root)
    return _tree(loader.construct_document(root))


def read_json(path: str | Path, name: str, do: str, most: int = JSON_BYTES) -> Any:
    """The document of a JSON file. Raises EvenloadError."""
    return parse_json(read_bytes(path, most, name, do), name, do)


def parse_json(content: str | bytes, name: str, do: str) -> Any:
    """The value that a text has as JSON (Python's: with NaN and Infinity). Raises EvenloadError."""
    try:
        value = json.loads(content)
        _refuse_deep(value)
        return value
    except Exception as error:  # see the module
        raise EvenloadError(f"{name} is not JSON", shorten(str(error) or type(error).__name__), do) from error


def mapping(value: Any, name: str, do: str) -> dict[str, Any]:
    """``value`` if it is a mapping whose keys are text. Raises EvenloadError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise EvenloadError(f"{name} holds no mapping of names to values", shown(value), do)
    return value


class _Loader(yaml.SafeLoader):
    """A SafeLoader of the types that JSON has; dates and the like are text, and other tags are unknown."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._values += 1
        if self._depth > MOST_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MOST_DEPTH} levels")
        if self._values > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > _MOST_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value)} digits: {node.value[:20]} ...")
        kind = node.tag.rpartition(":")[2]
        try:
            value: int | float = getattr(self, f"construct_yaml_{kind}")(node)
        except Exception as error:  # of a text that an explicit tag calls a number
            raise yaml.YAMLError(f"{shown(node.value)} is no {kind}") from error
        return value

    def construct_text(self, node: yaml.ScalarNode) -> str:
        value = str(self.construct_scalar(node))
        value.encode()  # a lone surrogate, written as an escape, is no text
        return value


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_constructors = {
    **{f"{_TAG}{name}": getattr(yaml.SafeLoader, f"construct_yaml_{name}") for name in ("null", "bool", "seq", "map")},
    **{f"{_TAG}{name}": _Loader.construct_number for name in ("int", "float")},
    f"{_TAG}str": _Loader.construct_text,
    None: yaml.SafeLoader.construct_undefined,
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(("timestamp", "value"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _refuse_large(root: yaml.Node) -> None:
    """Raise YAMLError where a value holds itself, or where aliases stand for too much or nest too deep."""
    sizes: dict[int, tuple[int, int] | None] = {}

    def size(node: yaml.Node) -> tuple[int, int]:
        """Characters and levels of a node with its aliases written out; None stands in while they are counted."""
        if id(node) not in sizes:
            sizes[id(node)] = None
            below = [size(inner) for inner in _below(node)]
            own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            sizes[id(node)] = 1 + own + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0)
        known = sizes[id(node)]
        if known is None:
            raise yaml.YAMLError("an anchor whose value holds itself")
        return known

    characters, levels = size(root)
    if characters > _MOST_TEXT or levels > MOST_DEPTH:
        raise yaml.YAMLError(f"aliases that stand for more than {_MOST_TEXT} characters or {MOST_DEPTH} levels")


def _tree(value: Any) -> Any:
    """A copy without parts that two places share: whoever sets one must not set the other."""
    if isinstance(value, dict):
        return {key: _tree(inner) for key, inner in value.items()}
    return [_tree(inner) for inner in value] if isinstance(value, list) else value


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [inner for pair in node.value for inner in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse_deep(value: Any) -> None:
    """Raise ValueError for nested lists and mappings that code which walks them could not leave again."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [child for each in inner for child in each if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {MOST_DEPTH} levels")
