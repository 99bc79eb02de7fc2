"""Rows that begin alike, for tests of what they share: drawn, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Rows = list[npt.NDArray[np.int64]]

BY_HAND: dict[str, list[list[int]]] = {
    "one row": [[1, 2, 3]],
    "nothing alike": [[1, 2], [2, 1], [3]],
    "equal rows": [[1, 2, 3], [1, 2, 3], [1, 2, 3]],
    "a row is a prefix of others": [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4, 5], [1]],
    "trunks of one token": [[1, 2, 2], [1, 3, 3], [2, 4], [2, 5]],
    "branches of one token": [[1, 1, 1, 1, leaf] for leaf in range(2, 7)],
    "depth 6": [[*range(depth), 9 + leaf] for depth in range(7) for leaf in range(2)],
    "32 leaves": [[7, 7, 7, leaf, leaf] for leaf in range(32)],
    "two trees": [[1, 1, 1, 2], [1, 1, 1, 3, 3], [2, 2, 2, 2], [2, 2, 2, 3]],
}


def rows_of(lists: list[list[int]]) -> Rows:
    return [np.array(row, dtype=np.int64) for row in lists]


@st.composite
def tries(draw: Any, most: int = 32) -> Rows:
    """Up to so many rows, each of which begins as some row before it does and then goes on by itself."""
    tail = st.lists(st.integers(0, 2), max_size=8)
    rows: list[list[int]] = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=24))]
    for before, kept, own in draw(st.lists(st.tuples(st.integers(0), st.integers(0, 40), tail), max_size=most - 1)):
        rows.append([*rows[before % len(rows)][:kept], *own] or [0])
    return rows_of(rows)
