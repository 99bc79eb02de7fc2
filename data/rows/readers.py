"""Rows as mappings of their fields, by JSON Lines and by arrow files; each is found again by an integer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...core.errors import EvenloadError, shorten
from ...core.input import reading
from ..arrow import open_table, parquet_schema
from ..documents import changed, require
from ..jsonl import read_line, read_objects
from .kinds import FieldKind, Placed, Row, field_kind

_DO = "store it as text, numbers, lists and structs of them, or as the Json of `datasets`"


class Rows(Protocol):
    """The rows of a data set."""

    name: str
    files: Sequence[Path]

    def read_all(self) -> Iterator[tuple[int, Placed]]:
        """Every row and its key, in order."""

    def read(self, key: int) -> Row:
        """The row of a key. Raises EvenloadError where the data changed."""

    def where(self, key: int) -> str:
        """The row's place, for messages."""


class JsonlRows(Rows):
    """One row a line that is not blank; its key is the byte at which it begins."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name, self.files = name or str(path), [path]

    def read_all(self) -> Iterator[tuple[int, Placed]]:
        return ((offset, Placed(place, row)) for place, offset, row in read_objects(self.files[0]))

    def read(self, key: int) -> Row:
        try:
            row = json.loads(read_line(self.files[0], key))
        except (ValueError, RecursionError) as error:
            raise changed(self.name) from error
        if not isinstance(row, dict):
            raise changed(self.name)
        return row

    def where(self, key: int) -> str:
        return f"the line at byte {key} of {self.name}"


class ArrowRows(Rows):
    """One row of the tables; its key is its number. Lists of integers stay arrays, views of the mapped file.

    Arrow gives every struct of a column the fields of all, so fields that are null are left out of them; what a Json
    column holds is what `datasets` gives, with its nulls. Raises EvenloadError for other extension types.
    """

    def __init__(self, name: str, files: Sequence[Path], fields: Collection[str]) -> None:
        self.name, self.files = name, files
        pa = require("pyarrow", f"reading {files[0]}")
        tables = [open_table(path) for path in files]
        used = [field for field in tables[0].column_names if field in fields]
        try:
            table = pa.concat_tables(table.select(used) for table in tables)
        except (pa.ArrowException, KeyError) as error:
            raise EvenloadError(f"the files of {name} differ", shorten(str(error)), "save all files alike") from error
        self._num_rows = table.num_rows
        kinds = {field: table.schema.field(field).type for field in used}
        values = {field: _value_of(kind, f"column {field!r} of {name}") for field, kind in kinds.items()}
        self._columns = {field: (table.column(field), _holds_ids(kinds[field]), values[field]) for field in used}

    def read_all(self) -> Iterator[tuple[int, Placed]]:
        return ((key, Placed(self.where(key), self.read(key))) for key in range(self._num_rows))

    def read(self, key: int) -> Row:
        return {field: _read(column[key], ids, value) for field, (column, ids, value) in self._columns.items()}

    def where(self, key: int) -> str:
        return f"row {key} of {self.name}"


def column_kinds(path: Path) -> dict[str, FieldKind]:
    """What the columns of an arrow or parquet file hold. Raises EvenloadError."""
    schema = parquet_schema(path) if path.suffix == ".parquet" else open_table(path).schema
    return {field.name: _column_kind(field.type) for field in schema}


def _column_kind(column: Any) -> FieldKind:
    types = require("pyarrow", "arrow").types
    if not (types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column)):
        return "other"
    return "messages" if types.is_struct(column.value_type) or _is_json(column.value_type) else "ids"


def first_kinds(path: Path) -> dict[str, FieldKind]:
    """What the fields of the first line of a JSON Lines file hold. Raises EvenloadError."""
    for _, _, row in read_objects(path):
        return {name: field_kind(value) for name, value in row.items()}
    raise EvenloadError(
        f"{path} holds no data", "not one line that is not blank", "give a file with a JSON object a line"
    )


def _holds_ids(column: Any) -> bool:
    return _column_kind(column) == "ids" and bool(require("pyarrow", "arrow").types.is_integer(column.value_type))


def _is_json(column: Any) -> bool:
    return getattr(column, "extension_name", None) == "arrow.json"


def _same(value: Any) -> Any:
    return value


def _value_of(column: Any, name: str) -> Callable[[Any], Any]:
    """What makes a value of a column of what arrow gives for it."""
    pa = require("pyarrow", "arrow")
    if _is_json(column):
        return lambda value: None if value is None else reading.parse_json(value, f"a value of {name}", _DO)
    if isinstance(column, pa.BaseExtensionType):
        raise EvenloadError(f"{name} has an extension type of arrow", str(column), _DO)
    if pa.types.is_struct(column):
        fields = [(field.name, _value_of(field.type, name)) for field in column]
        return lambda row: row and {field: of(row[field]) for field, of in fields if row[field] is not None}
    each = _value_of(column.value_type, name) if hasattr(column, "value_type") else _same
    return _same if each is _same else lambda values: values and [each(value) for value in values]


def _read(scalar: Any, ids: bool, value_of: Callable[[Any], Any]) -> Any:
    """A value of a column; a list of token ids without holes as an array."""
    if ids and scalar.is_valid and not scalar.values.null_count:
        return scalar.values.to_numpy()
    return value_of(scalar.as_py())
