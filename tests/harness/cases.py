"""Which cases of a product run at every change, and which in the full run alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

full = pytest.mark.full
"""A case of `make test-all`; `make test` leaves it out."""


def only_full(*values: Any, id: str | None = None) -> Any:
    """A row of `parametrize` that runs in `make test-all` alone."""
    return pytest.param(*values, id=id, marks=full)


def pairs(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """``@pairs(("size, layout", LAYOUTS), ("replay", REPLAYS))``: the product of some axes, as one `parametrize`.

    At every change run rows that hold each pair of values of any two axes at least once, chosen greedily in order; the
    others are marked ``full``. With one or two axes that is all of the product. Values may be `pytest.param`, and keep
    their marks. Ids are those of the values, joined in the order of the axes.
    """
    names = ", ".join(name for name, _ in axes)
    columns = [[_param(value, name) for value in values] for name, values in axes]
    rows = list(itertools.product(*columns))
    chosen = set(covering([len(column) for column in columns]))
    places = itertools.product(*(range(len(column)) for column in columns))
    return pytest.mark.parametrize(names, [_row(row, place in chosen) for row, place in zip(rows, places, strict=True)])


def covering(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Rows of the product of ``range(size)`` that hold every combination of values of any `strength` axes.

    Greedy: each time the first row that holds the most combinations not yet held.
    """
    rows = list(itertools.product(*map(range, sizes)))
    axes = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))
    held = {row: {(pair, tuple(row[axis] for axis in pair)) for pair in axes} for row in rows}
    missing = set().union(*held.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(held[row] & missing))
        chosen.append(best)
        missing -= held[best]
    return chosen


def _param(value: Any, names: str) -> Any:
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(*value) if "," in names else pytest.param(value)


def _row(row: Sequence[Any], chosen: bool) -> Any:
    values = [value for param in row for value in param.values]
    marks = [mark for param in row for mark in param.marks]
    ids = [param.id if param.id is not None else "-".join(map(_word, param.values)) for param in row]
    return pytest.param(*values, id="-".join(ids), marks=marks if chosen else [*marks, full])


def _word(value: Any) -> str:
    return value.__name__ if hasattr(value, "__name__") else str(value)
