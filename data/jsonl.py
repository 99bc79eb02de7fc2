"""JSON Lines: one object a line, with a field of text or of token ids.

The file is read through once: every line is parsed and, where it is text, tokenised, and its byte offset and length
are kept in the cache, so that later openings and other ranks read neither. A sample then costs one seek and one line.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, shorten, shown
from ..core.input import reading
from .cache import Arrays, cached_arrays, key_of
from .documents import BATCH, Documents, changed, missing_field
from .tokenizers import Tokenizer

_LINE_BYTES = 1 << 31
"""Of one document: a hundred million token ids take half of it."""
_PART_BYTES = 1 << 24
"""Of a line, read at once: a file that is no text is seen to be none by then."""


class JsonlDocuments(Documents):
    """One document per line that is not blank."""

    def __init__(self, path: Path, tokenizer: Tokenizer, field: str, name: str | None = None) -> None:
        self.name = name or str(path)
        self._path = path
        self._tokenizer = tokenizer
        self._field = field
        self.files = [path]
        scanned = cached_arrays(key_of([path], "jsonl-1", self._field, tokenizer.identity), self._scan)
        self.lengths: NDArray[np.int64] = scanned["lengths"]
        self._offsets = scanned["offsets"]
        self.vocab_size: int | None = int(scanned["vocab_size"][0])

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        line = read_line(self._path, int(self._offsets[document]))
        try:
            value = json.loads(line)[self._field]
            tokens = self._tokenizer.encode(value) if isinstance(value, str) else np.array(value, dtype=np.int64)
            if len(tokens) == self.lengths[document]:
                return tokens[start:stop]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise changed(self.name) from error
        raise changed(self.name)

    def where(self, document: int) -> str:
        return f"the line at byte {self._offsets[document]} of {self.name}"

    def _scan(self) -> Arrays:
        offsets, lengths = array("q"), array("q")
        vocab_size = 1
        texts: dict[int, str] = {}

        def tokenise() -> None:
            for document, length in zip(texts, self._tokenizer.lengths(list(texts.values())), strict=True):
                lengths[document] = length
            texts.clear()

        for place, offset, row in read_objects(self._path):
            if self._field not in row:
                raise missing_field([self._field], row, place)
            value = row[self._field]
            offsets.append(offset)
            lengths.append(0)
            if isinstance(value, str):
                vocab_size = max(vocab_size, self._tokenizer.vocab_size)
                texts[len(lengths) - 1] = value
                if len(texts) == BATCH:
                    tokenise()
            elif value is not None:
                ids = check_ids(value, self._field, place)
                lengths[-1] = len(ids)
                vocab_size = max(vocab_size, 1 + max(ids, default=0))
        tokenise()
        return {
            "offsets": np.array(offsets, dtype=np.int64),
            "lengths": np.array(lengths, dtype=np.int64),
            "vocab_size": np.array([vocab_size], dtype=np.int64),
        }


def read_line(path: Path, offset: int) -> bytes:
    """The line that begins at a byte of a file. Raises EvenloadError where it cannot be read."""
    name, do = shorten(str(path)), "restore it"
    with reading.open_file(path, name, do) as stream, reading.failures_of(name, do):
        stream.seek(offset)
        return _line(stream, name)


def read_values(path: Path) -> Iterator[tuple[str, int, Any]]:
    """(place for messages, byte offset, value) of every line that is not blank.

    Raises `EvenloadError` naming the line that is not JSON, or the file that cannot be read.
    """
    offset = number = 0
    name, do = shorten(str(path)), "check the path and its permissions"
    with reading.open_file(path, name, do) as stream, reading.failures_of(name, do):
        while line := _line(stream, name):
            number += 1
            if not line.isspace():
                yield f"line {number} of {name}", offset, _parse(line, f"line {number} of {name}")
            offset += len(line)


def read_objects(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """`read_values` of a file in which every line must be an object."""
    for place, offset, value in read_values(path):
        if not isinstance(value, dict):
            raise EvenloadError(f"{place} is not a JSON object", shown(value), 'write {"text": ...} on every line')
        yield place, offset, value


def check_ids(value: Any, field: str, place: str) -> list[int]:
    """``value`` if it is a list of token ids; raises `EvenloadError` with the first element that is none."""
    if not isinstance(value, list):
        do = "store a string or a list of integers, or name another field with data.text_key"
        raise EvenloadError(f"{field!r} in {place} is neither text nor a list of token ids", shown(value), do)
    if not set(map(type, value)) <= {int}:
        wrong = next(v for v in value if type(v) is not int)
        raise EvenloadError(f"{field!r} in {place} has a token that is not an integer", shown(wrong), "store token ids")
    if value and not (min(value) >= 0 and max(value) < 1 << 31):
        wrong = min(value) if min(value) < 0 else max(value)
        what = f"{field!r} in {place} has an impossible token id"
        raise EvenloadError(what, shown(wrong), "token ids are 0 .. 2^31-1")
    return value


def _line(stream: BinaryIO, name: str) -> bytes:
    """The next line, empty at the end. Raises EvenloadError for one that has no end."""
    line = stream.readline(_PART_BYTES)
    if len(line) < _PART_BYTES or line.endswith(b"\n"):
        return line
    parts = [line]
    while not parts[-1].endswith(b"\n") and parts[-1]:
        if len(parts) * _PART_BYTES > _LINE_BYTES or b"\0" in parts[-1]:
            detail = "a byte 0" if b"\0" in parts[-1] else f"a line of more than {_LINE_BYTES} bytes"
            raise EvenloadError(f"{name} is not JSON Lines", detail, "give an object a line")
        parts.append(stream.readline(_PART_BYTES))
    return b"".join(parts)


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        detail = shorten(f"{error}: {line[:60].decode('utf-8', 'backslashreplace').strip()}")
        whole = line.endswith(b"\n")
        do = "mend or delete the line" if whole else "the file ends inside this line: delete it, or copy the file again"
        raise EvenloadError(f"{place} is not valid JSON", detail, do) from error
