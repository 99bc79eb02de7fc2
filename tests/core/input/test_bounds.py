"""Integers, lengths and quantities of users: taken as they are, or refused by name."""

import itertools

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.input import bounds
from evenload.core.input.bounds import (
    lengths_of_batch,
    number_of_word,
    refuse_endless,
    refuse_odd_numbers,
    whole_number,
)
from hypothesis import given
from hypothesis import strategies as st

FORMS = {
    "int": lambda n: whole_number(n, "it", 1000),
    "numpy": lambda n: whole_number(np.int64(n), "it", 1000),
    "word": lambda n: number_of_word(str(n), "it", 1000),
    "spaces": lambda n: number_of_word(f" {n:+}\n", "it", 1000),
}


@given(st.integers(-5, 2000), st.sampled_from(sorted(FORMS)))
def test_integers_within_bounds_are_taken_in_any_form(number, form):
    if 1 <= number <= 1000:
        assert FORMS[form](number) == number
    else:
        with pytest.raises(EvenloadError, match="it is not an integer from 1 to 1000"):
            FORMS[form](number)


@pytest.mark.parametrize("value", [None, True, np.True_, 1.0, "1", b"1", [], 10**400, float("nan"), np.array([1])])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(EvenloadError, match="it is not an integer"):
        whole_number(value, "it", 1000)


@pytest.mark.parametrize("word", ["1.0", "", " ", "x", "0x1", "1_0", "\u0661", "--1", "1" * 5000, "1e2", "nan"])
def test_words_that_are_no_integer_are_refused(word):
    with pytest.raises(EvenloadError, match="it is not an integer"):
        number_of_word(word, "it", 1000)


@given(st.lists(st.integers(1, bounds.TOKENS), min_size=1, max_size=20))
def test_lengths_may_come_in_any_row_of_integers(lengths):
    for form in (lengths, tuple(lengths), iter(lengths), np.array(lengths), np.array(lengths, np.uint64)):
        batch = lengths_of_batch(form)
        assert batch.dtype == np.int64
        assert batch.tolist() == lengths


REFUSED = {
    "nothing": [],
    "no token": [5, 0],
    "negative": [-1],
    "beyond int64": [2**63],
    "unsigned": np.array([2**64 - 1], np.uint64),
    "a float": [5.0],
    "NaN": [float("nan")],
    "an array of floats": np.array([1.5, np.nan]),
    "booleans": [True],
    "texts": ["5"],
    "a text": "555",
    "bytes": b"555",
    "rows": [[1, 2]],
    "a table": np.ones((2, 2), int),
    "a number": 5,
    "no dimension": np.array(5),
    "a mapping": {5: 5},
    "a set": {5, 6},
    "a failing iterator": map(int, ["x"]),
    "too many in all": np.full(bounds.MOST_TOKENS // bounds.TOKENS + 1, bounds.TOKENS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_lengths_are_refused(name):
    with pytest.raises(EvenloadError) as caught:
        lengths_of_batch(REFUSED[name])
    assert caught.value.found
    assert caught.value.do


def test_rows_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(bounds, "SEQUENCES", 1000)
    with pytest.raises(EvenloadError, match="too many sequences"):
        lengths_of_batch(itertools.count(1))


@given(st.floats(allow_nan=True))
def test_quantities_are_nothing_or_of_a_size_that_can_be_multiplied(number):
    values = {"a": [{"b": 1.0}, {"c": number}], "name": "x", "flag": True, "none": None}
    if number == 0 or 1e-50 <= abs(number) <= 1e24:
        refuse_odd_numbers(values, "it")
    else:
        with pytest.raises(EvenloadError, match=r"it: a: c is no quantity"):
            refuse_odd_numbers(values, "it")


def test_what_users_do_is_within_bounds():
    """Clusters of 100,000 GPUs, batches of a million sequences, sequences of 100 million tokens."""
    assert bounds.RANKS >= 10 * 100_000
    assert bounds.SEQUENCES >= 10 * 1_000_000
    assert bounds.SAMPLES >= 100_000_000
    refuse_endless(np.array([100_000_000]), 4096)
    with pytest.raises(EvenloadError, match="more than 32768 slices"):
        refuse_endless(np.array([5, 1_000_000_000]), 8192)
