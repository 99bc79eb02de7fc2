"""Products of parameters: what runs at every change holds every pair of values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness.cases import covering, pairs


@pytest.mark.parametrize("sizes", [(3,), (3, 4), (2, 3, 3, 7), (7, 2, 3), (2, 2, 2, 2, 2)], ids=str)
def test_every_pair_of_values_is_in_a_row(sizes: tuple[int, ...]) -> None:
    rows = covering(sizes)
    assert len(rows) == len(set(rows))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert {row[0] for row in rows} == set(range(sizes[0]))
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.5 * largest[0] * largest[-1] or len(sizes) == 1, "about as many rows as the largest pair has"


def test_rows_that_others_make_needless_are_in_the_full_run() -> None:
    mark = pairs(("size, layout", [pytest.param(1, {}, id="one"), (2, "dp")]), ("a", "xy"), ("b", [True, False]))
    names, rows = mark.args
    assert names == "size, layout, a, b"
    assert len(rows) == 8
    ids = {row.id: {m.name for m in row.marks} for row in rows}
    assert set(ids) == {f"{first}-{a}-{b}" for first in ("one", "2-dp") for a in "xy" for b in (True, False)}
    kept = [row.values for row in rows if not row.marks]
    assert all(marks <= {"full"} for marks in ids.values())
    assert len(kept) == 4
    assert {(a, b) for _, _, a, b in kept} == {(a, b) for a in "xy" for b in (True, False)}


def test_marks_of_values_stay() -> None:
    values: list[Any] = [pytest.param(1, marks=pytest.mark.gpu), 2]
    _, rows = pairs(("a", values), ("b", [0, 1])).args
    assert all(any(mark.name == "gpu" for mark in row.marks) == (row.values[0] == 1) for row in rows)
