"""Parquet files, turned into one arrow file in the cache before they are used.

Parquet can be read by groups of rows only; in arrow a row costs no more than itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import EvenloadError, shorten
from .cache import cached_file, key_of
from .documents import choose_field, require

_ROWS = 4096
"""Rows held at once while converting."""


def parquet_as_arrow(files: Sequence[Path], text_key: str) -> Path:
    """The one column that is needed of ``files``, as an arrow file in the cache; written once, a batch at a time.

    Raises `EvenloadError` when a file is damaged, when the files differ, or when the cache has no room.
    """
    pa = require("pyarrow", f"reading {files[0]}")
    opened = [_open(path) for path in files]
    field = choose_field(opened[0].schema_arrow.names, text_key, str(files[0]))
    schema = pa.schema([pa.field(field, opened[0].schema_arrow.field(field).type)])
    for path, file in zip(files, opened, strict=True):
        column_type = file.schema_arrow.field(field).type if field in file.schema_arrow.names else "none"
        if column_type != schema.field(field).type:
            detail = f"type {column_type}, there {schema.field(field).type}"
            raise EvenloadError(f"{path} differs from {files[0]} in column {field!r}", detail, "write all files alike")

    def write(aside: Path) -> None:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for path, file in zip(files, opened, strict=True):
                for batch in _batches(file, field, path):
                    writer.write_batch(pa.RecordBatch.from_arrays([batch.column(field)], schema=schema))

    return cached_file(key_of(files, "parquet-1", field), ".arrow", write)


def _open(path: Path) -> Any:
    pa, parquet = require("pyarrow", f"reading {path}"), require("pyarrow.parquet", f"reading {path}")
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _batches(file: Any, field: str, path: Path) -> Iterator[Any]:
    # Advanced by hand: an OSError of the reader is the data's fault, one of whoever consumes the batches is not.
    pa = require("pyarrow", f"reading {path}")
    batches = file.iter_batches(batch_size=_ROWS, columns=[field])
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
