"""Which rows stay together: those that hold one value in the field of ``data.group``: completions of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError, nearest, shown
from ..cache import Arrays, cached_arrays, key_of
from .readers import Rows

_DO = "store an integer or a string in every row, or leave data.group out"


def group_numbers(rows: Rows, field: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Key and group of every row, int64 [num_rows] each; groups are numbered as they first appear. Read once, and kept.

    Raises EvenloadError naming the first row without the field, or in which it is neither integer nor string.
    """

    def scan() -> Arrays:
        keys, numbers = array("q"), array("q")
        known: dict[int | str, int] = {}
        for key, (place, row) in rows.read_all():
            if field not in row:
                raise no_group(place, field, row)
            value = row[field]
            if type(value) not in (int, str):
                raise EvenloadError(f"{field!r} in {place} names no group", shown(value), _DO)
            keys.append(key)
            numbers.append(known.setdefault(value, len(known)))
        return {"keys": np.array(keys, dtype=np.int64), "numbers": np.array(numbers, dtype=np.int64)}

    kept = cached_arrays(key_of(rows.files, "groups-1", field), scan)
    return kept["keys"], kept["numbers"]


def no_group(place: str, field: str, fields: Iterable[Any]) -> EvenloadError:
    """The error for a row, or a table, that says no group."""
    return EvenloadError(f"{place} has no field {field!r} that data.group asks for", nearest(field, fields), _DO)
