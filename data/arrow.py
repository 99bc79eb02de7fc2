"""Hugging Face data sets on disk: arrow files, mapped into memory, and parquet files, turned into arrow before.

A column of lists of integers is token ids, a column of strings is text. Arrow keeps where each row starts apart from
the rows, so lengths of ids, and of text under the `bytes` tokenizer, are read without touching a token. Text under
another tokenizer is tokenised once for its lengths, which are cached. Parquet can be read by groups of rows only; so it
becomes one arrow file in the cache, in which a row costs no more than itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, shorten
from .cache import cached_arrays, cached_file, key_of
from .documents import BATCH, Documents, require, vocab_size_of
from .tokenizers import ByteTokenizer, Tokenizer

_ROWS = 4096
"""Rows held at once while converting."""


class Chunk(NamedTuple):
    """Some consecutive rows: row i is ``values[offsets[i]:offsets[i + 1]]``. Views of the mapped file."""

    offsets: NDArray[Any]
    values: NDArray[Any]
    """Token ids, or the bytes of text."""
    null: NDArray[np.bool_] | None
    """Rows without a value; None where every row has one."""


class ArrowDocuments(Documents):
    """One document per row of the files, in their order. A row without a value is empty."""

    def __init__(self, name: str, files: Sequence[Path], tokenizer: Tokenizer, field: str) -> None:
        self.name = name
        self.files = list(files)
        self._tokenizer = tokenizer
        self._field = field
        tables = [open_table(path) for path in files]
        columns = [_column(table, self._field, path) for table, path in zip(tables, files, strict=True)]
        self._is_text = _is_text(tables, self._field, name)
        self._chunks = [chunk for column in columns for chunk in column]
        rows = [len(chunk.offsets) - 1 for chunk in self._chunks]
        self._first_row = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.vocab_size: int | None = tokenizer.vocab_size if self._is_text else None
        self._tokenise = self._is_text and not isinstance(tokenizer, ByteTokenizer)
        self.lengths: NDArray[np.int64] = self._lengths()

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        row = self._row(document)
        return self._tokenizer.encode(_text(row))[start:stop] if self._tokenise else row[start:stop]

    def scan_vocab_size(self) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        tokens = (chunk.values[int(chunk.offsets[0]) : int(chunk.offsets[-1])] for chunk in self._chunks)
        key = key_of(self.files, self._field, "arrow-vocab-1")
        return int(cached_arrays(key, lambda: vocab_size_of(tokens))["vocab_size"][0])

    def where(self, document: int) -> str:
        return f"row {document} of {self.name}"

    def _row(self, document: int) -> NDArray[Any]:
        place = int(np.searchsorted(self._first_row, document, side="right")) - 1
        offsets, values, _ = self._chunks[place]
        row = document - int(self._first_row[place])
        return values[offsets[row] : offsets[row + 1]]

    def _lengths(self) -> NDArray[np.int64]:
        if self._tokenise:
            key = key_of(self.files, self._field, "arrow-lengths-1", self._tokenizer.identity)
            return cached_arrays(key, self._count)["lengths"]
        lengths = [np.diff(chunk.offsets).astype(np.int64) for chunk in self._chunks]
        return self._without_nulls(np.concatenate([np.zeros(0, dtype=np.int64), *lengths]))

    def _count(self) -> dict[str, NDArray[np.int64]]:
        num_rows = int(self._first_row[-1])
        lengths: list[int] = []
        for start in range(0, num_rows, BATCH):
            batch = [_text(self._row(row)) for row in range(start, min(start + BATCH, num_rows))]
            lengths += self._tokenizer.lengths(batch)
        return {"lengths": self._without_nulls(np.array(lengths, dtype=np.int64))}

    def _without_nulls(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        for first, chunk in zip(self._first_row, self._chunks, strict=False):
            if chunk.null is not None:
                lengths[first : first + len(chunk.null)][chunk.null] = 0
        return lengths


def open_table(path: Path) -> Any:
    """A `pyarrow.Table` whose buffers lie in the mapped file (stream or file format).

    Raises `EvenloadError` when the file is damaged, or when pyarrow is missing.
    """
    pa = require("pyarrow", f"reading {path}")
    try:
        source = pa.memory_map(str(path))
        is_file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        return (pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)).read_all()
    except (pa.ArrowException, OSError, EOFError) as error:
        what = f"{path} is not a whole arrow file"
        raise EvenloadError(what, shorten(str(error)), "copy or save it again") from error


def _column(table: Any, field: str, path: Path) -> list[Chunk]:
    if field not in table.column_names:
        raise EvenloadError(f"{path} has no column {field!r}", f"{table.column_names}", "save all files alike")
    return [_chunk(chunk, field, path) for chunk in table.column(field).chunks if len(chunk)]


def _chunk(rows: Any, field: str, path: Path) -> Chunk:
    pa = require("pyarrow", f"reading {path}")
    null = rows.is_null().to_numpy(zero_copy_only=False) if rows.null_count else None
    kind = rows.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _, offsets, data = rows.buffers()
        wide = pa.types.is_large_string(kind)
        starts = np.frombuffer(offsets, dtype=np.int64 if wide else np.int32)[rows.offset : rows.offset + len(rows) + 1]
        return Chunk(starts, np.frombuffer(data or b"", dtype=np.uint8), null)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_list or pa.types.is_fixed_size_list(kind)) or not pa.types.is_integer(kind.value_type):
        what = f"column {field!r} of {path} is neither text nor lists of token ids"
        raise EvenloadError(what, f"type {kind}", "name another column with data.text_key")
    if rows.values.null_count:
        raise EvenloadError(f"column {field!r} of {path} has lists with holes", "null as a token", "save it without")
    values = rows.values.to_numpy(zero_copy_only=True)
    if is_list:
        return Chunk(rows.offsets.to_numpy(zero_copy_only=True), values, null)
    return Chunk((np.arange(len(rows) + 1) + rows.offset) * kind.list_size, values, null)


def _is_text(tables: Sequence[Any], field: str, name: str) -> bool:
    kinds = {str(table.schema.field(field).type) for table in tables}
    if len(kinds) > 1:
        what = f"column {field!r} of {name} differs from file to file"
        raise EvenloadError(what, f"{sorted(kinds)}", "save all files alike")
    return kinds <= {"string", "large_string"}


def _text(row: NDArray[Any]) -> str:
    return row.tobytes().decode("utf-8", "replace")


def parquet_as_arrow(files: Sequence[Path], fields: Collection[str]) -> Path:
    """The columns of ``fields`` that ``files`` have, as an arrow file in the cache; written once, a batch at a time.

    Raises `EvenloadError` when a file is damaged, when the files differ, or when the cache has no room.
    """
    pa = require("pyarrow", f"reading {files[0]}")
    opened = [_open(path) for path in files]
    first = opened[0].schema_arrow
    names = [name for name in first.names if name in fields]
    schema = pa.schema([pa.field(name, first.field(name).type) for name in names])
    for path, file in zip(files, opened, strict=True):
        _refuse_difference(path, file.schema_arrow, files[0], schema)

    def write(aside: Path) -> None:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for path, file in zip(files, opened, strict=True):
                for batch in _batches(file, names, path):
                    writer.write_batch(
                        pa.RecordBatch.from_arrays([batch.column(name) for name in names], schema=schema)
                    )

    return cached_file(key_of(files, "parquet-1", *names), ".arrow", write)


def parquet_schema(path: Path) -> Any:
    """The arrow schema of a parquet file. Raises EvenloadError where it is damaged."""
    return _open(path).schema_arrow


def _refuse_difference(path: Path, schema: Any, first_path: Path, first: Any) -> None:
    for field in first:
        column_type = schema.field(field.name).type if field.name in schema.names else "none"
        if column_type != field.type:
            detail = f"type {column_type}, there {field.type}"
            do = "write all files alike"
            raise EvenloadError(f"{path} differs from {first_path} in column {field.name!r}", detail, do)


def _open(path: Path) -> Any:
    pa, parquet = require("pyarrow", f"reading {path}"), require("pyarrow.parquet", f"reading {path}")
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _batches(file: Any, names: list[str], path: Path) -> Iterator[Any]:
    # Advanced by hand: an OSError of the reader is the data's fault, one of whoever consumes the batches is not.
    pa = require("pyarrow", f"reading {path}")
    batches = file.iter_batches(batch_size=_ROWS, columns=names)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from error
        yield batch


def _damaged(path: Path, error: Exception) -> EvenloadError:
    return EvenloadError(f"{path} is not a whole parquet file", shorten(str(error)), "copy or write it again")
