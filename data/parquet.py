"""Parquet files, turned into one arrow file in the cache before they are used.

Parquet can be read by groups of rows only; in arrow a row costs no more than itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import EvenloadError, shorten
from .cache import cached_file, key_of
from .documents import require

_ROWS = 4096
"""Rows held at once while converting."""


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
