"""Megatron's ``.bin`` / ``.idx`` pair, mapped into memory.

The index, little-endian: ``MMIDIDX\\0\\0``, u64 version = 1, u8 type code, u64 number of sequences n, u64 number of
document bounds m, i32[n] lengths [tokens], i64[n] positions in the .bin [bytes], i64[m] document bounds; multimodal
sets append i8[n] modes. The .bin is the tokens, one sequence after the other. Every sequence is one document here.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, shorten
from ..core.input import reading
from .cache import cached_arrays, key_of
from .documents import Documents, vocab_size_of

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LAST_BYTE = 1 << 62
"""No file is that long; where a sequence ends then stays inside int64."""


class Index(NamedTuple):
    """What an ``.idx`` file says."""

    dtype: np.dtype[Any]
    """Type of the tokens in the .bin."""
    lengths: NDArray[np.int64]
    """[num_sequences] tokens."""
    positions: NDArray[np.int64]
    """[num_sequences] first byte in the .bin, mapped."""


class BinIdxDocuments(Documents):
    """One document per sequence of the index."""

    vocab_size: int | None = None

    def __init__(self, prefix: Path) -> None:
        self.name = str(prefix)
        self._bin = prefix.with_name(prefix.name + ".bin")
        index_path = prefix.with_name(prefix.name + ".idx")
        index, self.files = read_index(index_path), [self._bin, index_path]
        self.lengths = index.lengths
        self._positions = index.positions
        self._tokens: NDArray[Any] = _map_tokens(self._bin, index)

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        first = int(self._positions[document]) // self._tokens.itemsize
        return self._tokens[first + start : first + stop]

    def scan_vocab_size(self) -> int:
        key = key_of([self._bin], "bin-vocab-1", self._tokens.dtype.str)
        return int(cached_arrays(key, lambda: vocab_size_of([self._tokens]))["vocab_size"][0])

    def where(self, document: int) -> str:
        return f"sequence {document} of {self.name}"


def read_index(path: Path) -> Index:
    """Read an ``.idx`` file; raises `EvenloadError` when it is missing, damaged, empty or not of tokens."""
    do = "give the prefix of an .idx and a .bin file that lie side by side"
    name = shorten(str(path))
    with reading.open_file(path, name, do) as stream, reading.failures_of(name, do):
        size = os.fstat(stream.fileno()).st_size
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise _corrupt(path, f"{size} bytes that begin with {header[:9]!r}, not {_MAGIC!r}")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != 1:
        raise _corrupt(path, f"version {version}; only version 1 is known")
    if code not in _TYPES:
        raise _corrupt(path, f"type code {code}; known: 1 .. 8")
    dtype = np.dtype(_TYPES[code])
    if dtype.kind == "f":
        raise EvenloadError(f"{path} does not index tokens", f"type {dtype.name}", "preprocess the text into token ids")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size not in (expected, expected + num_sequences):
        raise _corrupt(path, f"{size} bytes, {expected} expected for {num_sequences} sequences")
    if num_sequences == 0:
        raise EvenloadError(f"{path} indexes no sequence", "0 sequences", "preprocess the data again")
    if size > expected and np.fromfile(path, "i1", offset=expected).any():
        modes = "sequences of mode other than 0"
        raise EvenloadError(f"{path} belongs to a multimodal set", modes, "give a set of text alone")
    lengths = np.fromfile(path, "<i4", num_sequences, offset=_HEADER.size).astype(np.int64)
    positions = np.memmap(path, "<i8", mode="r", offset=_HEADER.size + 4 * num_sequences, shape=(num_sequences,))
    outside = positions.min() < 0 or positions.max() > _LAST_BYTE
    if lengths.min() < 0 or outside or (positions % dtype.itemsize).any():
        raise _corrupt(path, "a negative length, or a position that is not that of a token")
    return Index(dtype, lengths, positions)


def _map_tokens(path: Path, index: Index) -> NDArray[Any]:
    expected = int((index.positions + index.lengths * index.dtype.itemsize).max())
    do = "the .bin must lie next to the .idx under the same name"
    with reading.open_file(path, shorten(str(path)), do) as stream:
        size = os.fstat(stream.fileno()).st_size
    if size != expected:
        do = "copy or preprocess both files again, together"
        raise EvenloadError(f"{path} does not fit its index", f"{size} bytes, {expected} expected", do)
    if size == 0:
        raise EvenloadError(f"{path} holds no token", "0 bytes", "preprocess the data again")
    return np.memmap(path, dtype=index.dtype, mode="r")


def _corrupt(path: Path, detail: str) -> EvenloadError:
    return EvenloadError(f"{path} is not a whole Megatron index", detail, "copy or preprocess it again")
