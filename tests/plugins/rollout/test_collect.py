"""SART's rule: order statistics exactly, and a state machine that no schedule changes."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.plugins.rollout import Collect, Collected, Prune, ended_by, kept_beside_all, samples_for
from evenload.plugins.rollout.student_t import NU
from hypothesis import given
from hypothesis import strategies as st

from .plain_rule import plain


@pytest.mark.parametrize("of", [1, 2, 5, 7])
@pytest.mark.parametrize("share", [Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
def test_order_statistics_are_those_of_all_outcomes(of, share):
    """Every way in which samples are shorter or not, counted in fractions."""
    for keep in range(1, of + 1):
        chance = sum(
            math.prod((share if short else 1 - share for short in outcome), start=Fraction(1))
            for outcome in product((0, 1), repeat=of)
            if sum(outcome) >= keep
        )
        assert ended_by(keep, of, float(share)) == pytest.approx(float(chance), abs=1e-12)


def test_as_many_samples_as_are_needed():
    of = samples_for(4, 6.0, 0.7, 500, 0.9)
    lengths = np.exp(6 + 0.7 * np.random.default_rng(0).standard_t(NU, size=(40_000, of)))
    chances = [(np.sort(lengths[:, :count], axis=1)[:, 3] <= 500).mean() for count in (of - 1, of)]
    assert chances[0] < 0.9 + 0.01
    assert chances[1] > 0.9 - 0.01
    with pytest.raises(EvenloadError, match="end in time"):
        samples_for(4, 9.0, 0.2, 10, 0.9)


def collected(rule, lengths, scores):
    """Run the machine, its live samples in any order up to each border."""
    state = Collected(rule)
    while state.live:
        border = state.border + rule.every
        at = {i: scores[i, border // rule.every] for i in reversed(state.live)} if rule.prune else {}
        state = state.at_border({i: lengths[i] for i in state.live if lengths[i] <= border}, at)
    return state


@st.composite
def cases(draw):
    of = draw(st.integers(1, 8))
    keep = draw(st.integers(1, of))
    every = draw(st.integers(1, 6))
    prune = draw(st.none() | st.builds(Prune, st.floats(-1, 1), st.integers(0, of)))
    lengths = draw(st.lists(st.integers(1, 24), min_size=of, max_size=of))
    seed = draw(st.integers(0, 1000))
    last = 24 // every + 2
    drawn = np.random.default_rng(seed).choice([-0.9, -0.3, 0.1, 0.5, 0.9], size=(of, last + 1)).tolist()
    scores = {(i, border): drawn[i][border] for i in range(of) for border in range(last + 1)}
    return Collect(keep, of, every, prune), lengths, scores


@given(cases())
def test_as_many_are_kept_as_were_wanted_and_they_are_the_shortest(case):
    rule, lengths, scores = case
    state = collected(rule, lengths, scores)
    kept, pruned = plain(rule, lengths, scores)
    assert [number for _, number in state.ended] == kept
    assert {number: tokens for tokens, number in state.pruned} == pruned
    assert len(kept) == rule.keep
    assert not set(kept) & set(pruned)
    if rule.prune is None:
        assert kept == sorted(range(rule.of), key=lambda i: (lengths[i], i))[: rule.keep]


@given(cases(), st.randoms(use_true_random=False))
def test_no_schedule_changes_what_is_kept(case, random):
    """Samples run ahead of each other, one at a time, as slots allow; what is past need is stopped."""
    rule, lengths, scores = case
    state, tokens = Collected(rule), [0] * rule.of
    while state.live:
        border = state.border + rule.every
        ended = {i: lengths[i] for i in state.live if lengths[i] <= min(border, tokens[i])}
        stop = state.stops_at(ended)
        going = [
            i
            for i in state.live
            if i not in ended and tokens[i] < min(border, lengths[i]) and not (stop is not None and tokens[i] >= stop)
        ]
        if going:
            tokens[random.choice(going)] += 1
            continue
        at = {i: scores[i, border // rule.every] for i in state.live} if rule.prune else {}
        state = state.at_border(ended, at)
    whole = collected(rule, lengths, scores)
    assert state.ended == whole.ended
    assert state.pruned == whole.pruned
    last = {number: border for border, number in state.pruned}
    assert all(tokens[i] <= last.get(i, state.border) for i in range(rule.of)), "nobody runs past a border"


def test_before_the_first_ends_few_are_pruned_and_after_it_all_below_it():
    rule = Collect(1, 6, 10, Prune(0.5, 2))
    state = Collected(rule).at_border({}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.6, 4: 0.7, 5: 0.8})
    assert state.pruned == ((10, 0), (10, 1))
    rule = Collect(3, 6, 10, Prune(0.5, 2))
    state = Collected(rule).at_border({5: 4}, {0: 0.1, 1: 0.2, 2: 0.6, 3: 0.6, 4: 0.9, 5: 0.7})
    assert state.first_score == 0.7
    assert state.pruned == ((10, 0), (10, 1), (10, 2)), "and three are left that may end"
    assert state.live == (3, 4)


def test_a_row_says_what_is_kept_beside_all():
    lengths, scores = np.array([30, 10, 20, 90]), np.array([0.0, 1.0, 0.0, 1.0])
    state = collected(Collect(2, 4, 8), lengths.tolist(), {})
    row = kept_beside_all(state, lengths, scores)
    assert row == {
        "kept": 2,
        "pruned": 0,
        "tokens": 10 + 20 + 20 + 20,
        "tokens_of_all": 150,
        "kept_tokens": 15.0,
        "mean_tokens": 37.5,
        "kept_score": 0.5,
        "mean_score": 0.5,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((5, 4), "keep is not"),
        ((0, 4), "keep is not"),
        ((1, 4, 0), "below 1 token"),
        ((1, 4, 8, Prune(math.nan, 1)), "no rule"),
        ((1, 4, 8, Prune(0.5, -1)), "no rule"),
    ],
)
def test_rules_that_make_no_sense_are_refused(words, message):
    with pytest.raises(EvenloadError, match=message):
        Collect(*words)


def test_borders_that_cannot_be_are_refused():
    state = Collected(Collect(1, 2, 8, Prune(0.5, 1)))
    for scores in ({0: 1.0}, {0: 1.0, 1: math.nan}, {}):
        with pytest.raises(EvenloadError, match="a score is missing"):
            state.at_border({}, scores)
    for ended in ({0: 9}, {0: 0}, {2: 4}):
        with pytest.raises(EvenloadError, match="do not live"):
            state.at_border(ended, {0: 1.0, 1: 1.0})
    done = state.at_border({0: 3}, {0: 1.0, 1: 1.0})
    assert done.live == ()
    with pytest.raises(EvenloadError, match="decided"):
        done.at_border({}, {})
