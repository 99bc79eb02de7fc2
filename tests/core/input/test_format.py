"""Results are JSON, whatever arithmetic gave."""

import json
from pathlib import Path

import numpy as np
from evenload.core.input.format import to_json
from hypothesis import given
from hypothesis import strategies as st

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda ulysses_degree: st.one_of(st.lists(ulysses_degree), st.dictionaries(st.text(), ulysses_degree)),
    max_leaves=15,
)


def refuse(name):
    raise AssertionError(name)


@given(VALUES, st.booleans())
def test_every_value_is_json_and_finite_ones_stay(value, compact):
    text = to_json(value, compact=compact)
    assert "\n" not in text
    read = json.loads(text, parse_constant=refuse)
    if "null" not in text:
        assert read == value


def test_no_number_is_null():
    value = {"a": [1.5, np.float64("nan"), float("inf")], "b": (-float("inf"),), "c": Path("x")}
    assert json.loads(to_json(value)) == {"a": [1.5, None, None], "b": [None], "c": "x"}
