"""LENGTHS files: how long the sequences are, for planning without the data.

``.npy`` (one-dimensional integers), ``.txt`` (one integer a line), ``.jsonl`` (per line an integer, or an object with
``length``, ``input_ids``, ``tokens`` or ``text``, the last counted in bytes, or a prompt and its answers, all of them
samples: ``{"prompt": 812, "completions": [344, 90]}``), Megatron ``.idx``.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SHOWN, EvenloadError, nearest, shorten, shown
from ..core.input import reading
from ..core.input.bounds import TOKENS, refuse_uncountable
from .bin_idx import read_index
from .documents import ID_FIELDS
from .jsonl import check_ids, read_values
from .tokenizers import ByteTokenizer

_BLOCK_BYTES = 1 << 24
"""Of a .txt file, read at once."""


class SharedPrompts(NamedTuple):
    """Samples of which those of a group begin alike, with its prompt."""

    prompts: NDArray[np.int64]
    """[num_sequences] tokens of each one's prompt; 0: it has none."""
    groups: NDArray[np.int64]


def read_lengths(path: str | Path) -> NDArray[np.int64]:
    """Lengths [num_sequences] in tokens, each 1 or more; a million lines take 0.15 s (.txt) or 2.8 s (.jsonl).

    Raises `EvenloadError` naming the line or row and the value where a length is no positive integer, and when the file
    is missing, empty or of an unknown kind.
    """
    return read_prompted(path)[0]


def read_prompted(path: str | Path) -> tuple[NDArray[np.int64], SharedPrompts | None]:
    """`read_lengths`, and which of them begin alike; None: the file has no prompts. Raises EvenloadError."""
    path = Path(os.path.expanduser(path))
    name = shorten(str(path))
    reader = _READERS.get(path.suffix)
    if reader is None:
        detail = f"the ending {shown(path.suffix)}"
        raise EvenloadError(f"lengths cannot be read from {name}", detail, nearest(path.suffix, _READERS))
    if not reading.is_file(path):
        raise EvenloadError(f"there is no lengths file {name}", "no regular file with that name", "check the path")
    parts, shared = [], list[SharedPrompts]()
    for lengths, place, *prompted in reader(path, name):
        shared += prompted
        outside = np.flatnonzero((lengths < 1) | (lengths > TOKENS))
        if len(outside):
            first = int(outside[0])
            raise _bad(place(first), int(lengths[first]))
        parts.append(lengths)
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    if not len(lengths):
        raise EvenloadError(f"{name} holds no length", "an empty file", "give one positive integer per sequence")
    refuse_uncountable(lengths, name)
    return lengths, next(iter(shared), None)


_Part = tuple[NDArray[np.int64], Callable[[int], str], *tuple[SharedPrompts, ...]]
"""Some lengths, how to name the place of one in a message, and which begin alike, if any do."""


def _read_npy(path: Path, name: str) -> Iterator[_Part]:
    do = "write it with numpy.save"
    with reading.open_file(path, name, do) as stream:
        try:
            lengths = _array(stream)
        except Exception as error:  # numpy's parser raises SyntaxError, TypeError, tokenize.TokenError and more
            detail = shorten(f"{type(error).__name__}: {error}")
            raise EvenloadError(f"{name} is not a numpy array", detail, do) from error
    if isinstance(lengths, str):
        raise EvenloadError(f"{name} is not a list of integers", lengths, "save a 1-D integer array")
    if lengths.dtype.kind == "u":  # a value beyond int64 must stay too large instead of turning negative
        lengths = np.minimum(lengths.astype(np.uint64), np.uint64(TOKENS + 1))
    yield lengths.astype(np.int64), lambda row: f"row {row} of {name}"


def _array(stream: BinaryIO) -> NDArray[Any] | str:
    """The row of integers in a .npy file, or what it holds instead. No object is unpickled, nothing taken on trust."""
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if len(shape) != 1 or dtype.kind not in "iu":
        return shorten(f"shape {shape}, {dtype}")
    size = os.fstat(stream.fileno()).st_size - stream.tell()
    if type(shape[0]) is not int or not 0 <= shape[0] * dtype.itemsize <= size:
        raise ValueError(f"{size} bytes of data for {shape[0]} integers")
    return np.fromfile(stream, dtype, shape[0])


def _read_txt(path: Path, name: str) -> Iterator[_Part]:
    """A block of lines at a time; the last one of a block may go on in the next."""
    do = "give one integer a line"
    with reading.open_file(path, name, do) as stream:
        rest, before = b"", 0
        while True:
            with reading.failures_of(name, do):
                block = stream.read(_BLOCK_BYTES)
            text = rest + block
            lines = text.splitlines(keepends=True)
            rest = lines.pop() if block and lines else b""
            if len(rest) > _BLOCK_BYTES:
                raise _bad(f"line {before + len(lines) + 1} of {name}", rest[:SHOWN])
            if lines:
                yield _of_lines(lines, b"_" not in text, before, name)
            before += len(lines)
            if not block:
                return


def _of_lines(lines: list[bytes], plain: bool, before: int, name: str) -> _Part:
    """The lengths of lines that ``before`` others precede; ``plain``: no underscores, which Python allows in 1_000."""
    if plain:
        with contextlib.suppress(ValueError, OverflowError):
            return np.array(list(map(int, lines)), dtype=np.int64), lambda row: f"line {before + row + 1} of {name}"
    numbers = [number for number, line in enumerate(lines, before + 1) if line.strip()]
    values = [_integer(lines[number - before - 1], f"line {number} of {name}") for number in numbers]
    return np.array(values, dtype=np.int64), lambda row: f"line {numbers[row]} of {name}"


def _read_jsonl(path: Path, name: str) -> Iterator[_Part]:
    lengths, prompts = array("q"), list[tuple[slice, int]]()
    for place, _, value in read_values(path):
        if _is_prompted(value):
            prompt, *answers = _prompt_and_answers(value, place)
            prompts.append((slice(len(lengths), len(lengths) + len(answers)), prompt))
            lengths.extend(prompt + answer for answer in answers)
        else:
            lengths.append(_positive(_length_of(value, place), place))
    prompted = SharedPrompts(np.zeros(len(lengths), dtype=np.int64), np.arange(len(lengths)))
    for samples, prompt in prompts:
        prompted.prompts[samples], prompted.groups[samples] = prompt, samples.start
    yield np.array(lengths, dtype=np.int64), lambda row: name, *([prompted] if prompts else [])


def _read_idx(path: Path, name: str) -> Iterator[_Part]:
    yield read_index(path).lengths, lambda row: f"sequence {row} of {name}"


_READERS: dict[str, Callable[[Path, str], Iterator[_Part]]] = {
    ".npy": _read_npy,
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".idx": _read_idx,
}


_PAIR = ("chosen", "rejected")
_OF_PROMPTED, _OF_LENGTH = frozenset(("prompt", "completions", *_PAIR)), frozenset(("length", *ID_FIELDS, "text"))


def _is_prompted(value: Any) -> bool:
    return isinstance(value, dict) and _OF_LENGTH.isdisjoint(value) and not _OF_PROMPTED.isdisjoint(value)


def _prompt_and_answers(value: dict[str, Any], place: str) -> list[int]:
    """Tokens of a prompt, then of each of its answers."""
    answers = value.get("completions", [value[name] for name in _PAIR] if value.keys() >= set(_PAIR) else None)
    if not isinstance(answers, list) or not answers:
        do = 'write {"prompt": 812, "completions": [344, 90]} in tokens, or give --tokenizer for text'
        raise EvenloadError(f"{place} gives no completions", shown(answers), do)
    places = [f"the prompt of {place}", *[f"an answer of {place}"] * len(answers)]
    return list(map(_positive, map(_integer, [value.get("prompt"), *answers], places), places))


def _length_of(value: Any, place: str) -> int:
    if isinstance(value, dict):
        if "length" in value:
            return _integer(value["length"], place)
        for field in ID_FIELDS:
            if field in value:
                return len(check_ids(value[field], field, place))
        if isinstance(value.get("text"), str):
            return ByteTokenizer().lengths([value["text"]])[0]
        hint = nearest("length", value)
        raise EvenloadError(f"{place} gives no length", hint, "give length, input_ids, tokens or text")
    return _integer(value, place)


def _integer(value: Any, place: str) -> int:
    """``value`` as an integer of at most `TOKENS`; raises `EvenloadError` naming the place."""
    if isinstance(value, bytes) and b"_" not in value:
        with contextlib.suppress(ValueError):
            value = int(value)
    if type(value) is not int or abs(value) > TOKENS:
        raise _bad(place, value)
    return value


def _positive(length: int, place: str) -> int:
    if length < 1:
        raise _bad(place, length)
    return length


def _bad(place: str, value: Any) -> EvenloadError:
    text = value.decode("utf-8", "backslashreplace").strip() if isinstance(value, bytes) else None
    detail = shown(value) if text is None else shorten(text, 80)
    return EvenloadError(f"{place} is not a length", detail, f"a length is an integer from 1 to {TOKENS}")
