"""LENGTHS files: how long the sequences are, for planning without the data.

``.npy`` (one-dimensional integers), ``.txt`` (one integer a line), ``.jsonl`` (per line an integer, or an object with
``length``, ``input_ids``, ``tokens`` or ``text``, the last counted in bytes), Megatron ``.idx``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, nearest
from .bin_idx import read_index
from .jsonl import check_ids, read_values
from .tokenizers import ByteTokenizer

_LARGEST = 1 << 40
"""Tokens. No sequence is that long; sums of lengths then stay far inside int64."""


def read_lengths(path: str | Path) -> NDArray[np.int64]:
    """Lengths [num_sequences] in tokens, each 1 or more, in the order of the file. A million lines take
    0.15 s (.txt) or 2.8 s (.jsonl) on one x86 core.

    Raises `EvenloadError` naming the line or row and the value where a length is no positive integer, and when the file
    is missing, empty or of an unknown kind.
    """
    path = Path(path).expanduser()
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise EvenloadError(
            f"{path} is of no kind that holds lengths", f"the ending {path.suffix!r}", nearest(path.suffix, _READERS)
        )
    if not path.is_file():
        raise EvenloadError(f"there is no lengths file {path}", "no file of that name", "check the path")
    try:
        lengths, place = reader(path)
    except OSError as error:
        raise EvenloadError(f"cannot read {path}", str(error), "check its permissions") from error
    if not len(lengths):
        raise EvenloadError(f"{path} holds no length", "an empty file", "give one positive integer per sequence")
    outside = np.flatnonzero((lengths < 1) | (lengths > _LARGEST))
    if len(outside):
        first = int(outside[0])
        raise _bad(place(first), lengths[first])
    return lengths


_Found = tuple[NDArray[np.int64], Callable[[int], str]]
"""Lengths, and how to name the place of one in a message."""


def _read_npy(path: Path) -> _Found:
    try:
        lengths = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EvenloadError(f"{path} is not a numpy array", str(error), "write it with numpy.save") from error
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        shape, dtype = getattr(lengths, "shape", "?"), getattr(lengths, "dtype", "?")
        raise EvenloadError(f"{path} is not a list of integers", f"shape {shape}, {dtype}", "save a 1-D integer array")
    if lengths.dtype.kind == "u":  # a value beyond int64 must stay too large instead of turning negative
        lengths = np.minimum(lengths.astype(np.uint64), np.uint64(_LARGEST + 1))
    return lengths.astype(np.int64), lambda row: f"row {row} of {path}"


def _read_txt(path: Path) -> _Found:
    content = path.read_bytes()
    lines = content.splitlines()
    if b"_" not in content:  # Python reads 1_000 as an integer; a lengths file has no business with it
        with contextlib.suppress(ValueError, OverflowError):
            return np.array(list(map(int, lines)), dtype=np.int64), lambda row: f"line {row + 1} of {path}"
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    values = [_integer(lines[number - 1], f"line {number} of {path}") for number in numbers]
    return np.array(values, dtype=np.int64), lambda row: f"line {numbers[row]} of {path}"


def _read_jsonl(path: Path) -> _Found:
    places, lengths = [], []
    for place, _, value in read_values(path):
        places.append(place)
        lengths.append(_length_of(value, place))
    return np.array(lengths, dtype=np.int64), lambda row: places[row]


def _read_idx(path: Path) -> _Found:
    return read_index(path).lengths, lambda row: f"sequence {row} of {path}"


_READERS: dict[str, Callable[[Path], _Found]] = {
    ".npy": _read_npy,
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".idx": _read_idx,
}


def _length_of(value: Any, place: str) -> int:
    if isinstance(value, dict):
        if "length" in value:
            return _integer(value["length"], place)
        for field in ("input_ids", "tokens"):
            if field in value:
                return len(check_ids(value[field], field, place))
        if isinstance(value.get("text"), str):
            return ByteTokenizer().lengths([value["text"]])[0]
        hint = nearest("length", value)
        raise EvenloadError(f"{place} gives no length", hint, "give length, input_ids, tokens or text")
    return _integer(value, place)


def _integer(value: Any, place: str) -> int:
    """``value`` as an integer of at most `_LARGEST`; raises `EvenloadError` naming the place."""
    if isinstance(value, bytes) and b"_" not in value:
        with contextlib.suppress(ValueError):
            value = int(value)
    if type(value) is not int or abs(value) > _LARGEST:
        raise _bad(place, value)
    return value


def _bad(place: str, value: Any) -> EvenloadError:
    shown = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    return EvenloadError(f"{place} is not a length", f"{shown!s:.80}", f"a length is an integer from 1 to {_LARGEST}")
