"""The weights that rows give their targets in a field of their own (``data.weight_column``).

A row holds one number for all of its targets, or a list with one for each of them, in their order: the tokens of its
documents that carry loss, without the first one of each document. A weight may have any sign.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import EvenloadError, nearest, shown
from ..cache import Arrays, cached_arrays, key_of
from ..documents import Documents
from ..samples.cut import TargetSpans
from ..samples.weights import WeightRuns
from .readers import Rows

_DO = "store a number, or a list of one for each target token, in every row, or leave data.weight_column out"


def read_weights(rows: Rows, field: str, documents: Documents, spans: TargetSpans) -> WeightRuns | None:
    """The weights of the targets ``spans`` of documents that were made of rows; None where each is 1. Read once, and
    kept.

    Raises EvenloadError naming the first row without the field, or in which it is neither a finite number nor a list of
    as many of them as the row has targets.
    """

    def scan() -> Arrays:
        start, value = array("q"), array("d")
        begin, keys = np.concatenate([[0], np.cumsum(documents.lengths)]), documents.keys
        for number, (key, (place, row)) in enumerate(rows.read_all()):
            if field not in row:
                raise no_weight(place, field, row)
            first, last = number, number + 1
            if keys is not None:
                first, last = int(np.searchsorted(keys, key)), int(np.searchsorted(keys, key, side="right"))
            borders = begin[first : last + 1].tolist()
            for token, weight in _runs(row[field], borders, spans, f"{field!r} in {place}"):
                if not value or weight != value[-1]:
                    start.append(token if value else 0)
                    value.append(weight)
        return {"start": np.array(start, dtype=np.int64), "value": np.array(value).view(np.int64)}

    encoded = hashlib.blake2b(digest_size=16)
    for one in (documents.lengths, *spans):
        encoded.update(one.astype("<i8").tobytes())
    kept = cached_arrays(key_of(rows.files, "weights-1", field, encoded.hexdigest()), scan)
    runs = WeightRuns(kept["start"], kept["value"].view(np.float64))
    return None if (runs.value == 1).all() else runs


def _runs(value: Any, borders: list[int], spans: TargetSpans, what: str) -> Iterable[tuple[int, float]]:
    """(Place from which on it holds, weight) of the targets of a row, whose documents lie between these borders."""
    if not isinstance(value, list | np.ndarray):
        return [(borders[0], _number(value, what))] if borders[-1] > borders[0] else []
    places = [first + 1 + np.flatnonzero(spans.mask(first + 1, end)) for first, end in pairwise(borders) if end > first]
    targets = np.concatenate([np.zeros(0, dtype=np.int64), *places]).tolist()
    if len(targets) != len(value):
        detail = f"{len(value)} numbers, {len(targets)} target tokens"
        raise EvenloadError(f"{what} has not one weight for each target token", detail, _DO)
    return zip(targets, [_number(one, what) for one in value], strict=True)


def _number(value: Any, what: str) -> float:
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    with suppress(OverflowError):
        if known and math.isfinite(value):
            return float(value)
    raise EvenloadError(f"{what} is no weight", shown(value), _DO)


def no_weight(place: str, field: str, fields: Iterable[Any]) -> EvenloadError:
    """The error for a row, or a table, that gives no weights."""
    return EvenloadError(
        f"{place} has no field {field!r} that data.weight_column asks for", nearest(field, fields), _DO
    )
