"""Guesses by texts: those of their definition, and a bound of what is remembered."""

import json
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from evenload.core.drafters import drafter_of
from evenload.core.errors import EvenloadError
from evenload.core.recipe.generated import DraftRule
from evenload.plugins.rollout import texts
from evenload.plugins.rollout.sample_file import earlier_samples, refuse_unreadable
from evenload.runtime.generate.request import Completion, Request
from hypothesis import given

REQUEST = Request(4, tuple(range(20, 40)), 100, (0, 1, 2))


def sample(number, new=(), request=REQUEST):
    return SimpleNamespace(request=request, number=number, new=list(new))


def said(number, tokens, prompt=4):
    return Completion(prompt, number, tuple(tokens), (0.0,) * len(tokens), "limit")


def drafter(earlier=(), most=6):
    return drafter_of(DraftRule(by="texts", most=most))(earlier)


def guessed(own, of, most):
    return own.guess(of, most, 0.0)


def test_a_sample_is_guessed_to_say_what_it_said():
    old = (5, 6, 7, 8, 9, 10, 11, 12, 13)
    own = drafter([said(0, (1, 2)), said(0, old), said(1, (9,) * 9), said(0, (3,) * 9, prompt=5)])
    assert guessed(own, sample(0), 4) == [5, 6, 7, 8]
    assert guessed(own, sample(0, old[:2]), 15) == [7, 8, 9, 10, 11, 12]
    moved = (5, 6, 0, 8, 9)
    assert guessed(own, sample(0, moved[:3]), 4) == [], "nothing has ever followed"
    assert guessed(own, sample(0, (*moved, 10)), 9) == [11, 12, 13], "the place counts"
    assert guessed(own, sample(0, (*old, 9)), 4) == []


def test_what_repeats_itself_goes_on_to():
    assert guessed(drafter(), sample(0, [1, 2, 3, 1, 2, 3]), 5) == [1, 2, 3, 1, 2]


def test_the_prompt_and_other_samples_are_looked_up_in():
    own = drafter()
    assert guessed(own, sample(0, [22, 23, 24]), 3) == [25, 26, 27]
    own.saw(sample(1, [7, 7, 7, 1]))
    own.saw(sample(0, [7, 7, 7, 2]))
    own.saw(sample(2, [7, 7, 7, 3]))
    assert guessed(own, sample(1, [7, 7, 7, 1, 0, 7, 7, 7]), 1) == [1], "itself comes first"
    other = sample(1, [7, 7, 7], REQUEST._replace(number=5))
    assert guessed(own, other, 1) == [], "of another prompt nothing counts"


def by_definition(steps, earlier, most):
    """What is guessed after each step: a search through all places that were shown, the newest first."""
    begin = list(REQUEST.tokens[-12:])
    places, grown, guesses = [], {}, []

    def show(text, first, number):
        places.extend((number, text, place) for place in range(first, len(text)))

    show(list(REQUEST.tokens), 0, None)
    for one in earlier:
        show([*begin, *one.tokens], 12, one.sample)
    for number, tokens in steps:
        text = grown.setdefault(number, list(begin))
        text += tokens
        show(text, len(text) - len(tokens), number)
        new, own = text[12:], [one.tokens for one in earlier if one.sample == number]
        old, at = list(own[-1]) if own else [], len(new)
        if at < len(old) and old[max(0, at - 3) : at] == new[-3:]:
            guesses.append(old[at:][:most])
            continue
        found = None
        for order in (12, 8, 5, 3):
            last = text[-order:]
            same = [p for p in places if p[2] >= order and p[1][p[2] - order : p[2]] == last]
            found = found or next(iter([p for p in same[::-1] if p[0] == number] + same[::-1]), None)
        guess = found[1][found[2] :][:most] if found else []
        while found and found[1] is text and len(guess) < most:
            guess = (guess * most)[:most]
        guesses.append(guess)
    return guesses


TOKENS = st.lists(st.integers(0, 2), max_size=9)


@given(st.lists(st.tuples(st.integers(0, 2), TOKENS), max_size=9), st.lists(st.tuples(st.integers(0, 2), TOKENS)))
def test_guesses_are_those_of_a_search(steps, earlier):
    known = [said(number, tokens) for number, tokens in earlier]
    one, other, grown, guesses = drafter(known), drafter(known), {}, []
    for number, tokens in steps:
        grown.setdefault(number, sample(number)).new += tokens
        other.saw(grown[number])
        guesses.append(guessed(one, grown[number], 15))
        assert guessed(other, grown[number], 15) == guesses[-1], "ranks that hold a model together guess alike"
    assert guesses == by_definition(steps, known, 6)


def test_a_guess_is_as_long_as_it_is_right_with_the_probability_that_is_asked_for():
    """At first four of five are believed to be right."""
    text = [*range(1, 60)]
    own, one = drafter([said(0, text), said(1, text)], most=15), sample(0)
    assert [len(own.guess(one, 15, least)) for least in (0.0, 0.5, 0.81, 1.1)] == [15, 3, 0, 0]
    assert len(own.guess(one, 2, 0.3)) == 2
    for _ in range(3):
        one.new += own.guess(one, 15, 0.0)
        own.saw(one)
    assert len(own.guess(one, 15, 0.8)) == 11, "49 of 50 are right by now"
    other = sample(1, text[:5])
    for _ in range(40):
        assert own.guess(other, 15, 0.0)[:2] == [6, 7]
        other.new[5:] = [6, 0]
        own.saw(other)
        other.new[5:] = []
    right = (4 + 45 + 40) / (5 + 45 + 80)
    depth = max(k for k in range(15) if right**k >= 0.2)
    assert len(own.guess(other, 15, 0.2)) == depth == 4
    assert own.guess(sample(2, [22, 23, 24]), 9, 0.5) == [25, 26, 27], "of guesses of another kind nothing is known"


def test_what_was_not_used_for_longest_is_forgotten(monkeypatch):
    monkeypatch.setattr(texts, "_MOST", 100)
    own, long = drafter([said(2, [6] * 60), said(1, [7] * 40)]), sample(0, [1, 2, 3, 4] * 10)
    assert guessed(own, long, 2) == [1, 2]
    assert guessed(own, sample(1, [9, 7, 7, 7]), 2) == [7, 7]
    for number in range(5, 9):
        guessed(own, sample(0, [number] * 30, REQUEST._replace(number=number)), 2)
    assert [*own._texts] == [7, 8]
    assert sum(one.size for one in own._texts.values()) == 2 * (20 + 30)
    assert guessed(own, sample(0, [5] * 500, REQUEST._replace(number=9)), 2) == [5, 5]
    assert guessed(own, sample(0, [5] * 501, REQUEST._replace(number=9)), 2) == [5, 5]


def test_a_sample_that_comes_from_elsewhere_is_known_by_its_end(monkeypatch):
    monkeypatch.setattr(texts, "_MOST_AT_ONCE", 10)
    moved = sample(0, [*range(50), 1, 2, 3, 4, 5, 1, 2, 3])
    assert guessed(drafter(), moved, 3) == [4, 5, 1]
    assert guessed(drafter(), sample(0, [*range(50), 10, 11, 12]), 3) == []


def test_earlier_samples_are_those_of_this_vocabulary(tmp_path, caplog):
    rows = [{"prompt": 0, "sample": 1, "tokens": [5, 70], "log_probs": [0.0, 0.0], "ended": "end", "run": "a"}]
    rows += [{**rows[0], "tokens": [5, 300]}, {"text": "no sample"}, {**rows[0], "sample": 2, "run": "b"}]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = earlier_samples(tmp_path / "o.jsonl", 256)
    assert [(one.sample, one.tokens) for one in known] == [(1, (5, 70)), (2, (5, 70))]
    assert "2 of 4 lines" in caplog.text
    with pytest.raises(EvenloadError, match=r"earlier samples .*nowhere.jsonl cannot be read"):
        refuse_unreadable(tmp_path / "nowhere.jsonl")


def test_a_name_that_nobody_drafts_by_is_refused():
    with pytest.raises(EvenloadError, match="names no drafter") as caught:
        drafter_of(DraftRule(by="text"))
    assert "did you mean 'texts'" in str(caught.value)
