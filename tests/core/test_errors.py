"""What messages repeat of a user's values: little of it, and nothing that steers a terminal."""

import pytest
from evenload.core.errors import SHOWN, EvenloadError, PlanError, RankError, shorten, shown
from hypothesis import given
from hypothesis import strategies as st

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
VALUES = st.recursive(
    LEAVES,
    lambda ulysses_degree: st.one_of(st.lists(ulysses_degree), st.dictionaries(st.text(), ulysses_degree)),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_shown_in_a_line_of_bounded_length(value):
    text = shown(value)
    assert 0 < len(text) <= SHOWN
    assert text.isprintable()


@given(st.text(st.characters()), st.integers(10, 300))
def test_texts_are_shortened_and_short_ones_stay(text, most):
    short = shorten(text, most)
    assert len(short) <= most
    assert short.replace("\n", "").isprintable()
    if len(text) <= most and text.isprintable():
        assert short == text


def test_what_has_no_end_is_shown_all_the_same():
    within = ["l"] * 9
    for _ in range(9):
        within = [within] * 9  # 9^10 items
    endless = []
    endless.append(endless)
    for value in (within, endless, 10**100_000, b"x" * 10**8, "x" * 10**8):
        assert len(shown(value)) <= SHOWN


@pytest.mark.parametrize("kind", [EvenloadError, PlanError, RankError])
def test_messages_end(kind):
    error = kind("x" * 10**6, "\x1b[31m" * 10**5, "\udcff")
    assert len(str(error)) < 7000
    assert "\x1b" not in str(error)
    str(error).encode()
