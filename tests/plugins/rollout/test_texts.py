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


def test_prompts_and_other_samples_are_looked_up_in():
    own, other = drafter(), REQUEST._replace(number=5, tokens=(9, 9, 9))
    assert guessed(own, sample(3, [22, 23, 24]), 3) == [25, 26, 27]
    own.saw(sample(1, [7, 7, 6, 1]))
    own.saw(sample(0, [5, 8, 7, 6, 2]))
    own.saw(sample(2, [4, 8, 7, 6, 3]))
    assert guessed(own, sample(1, [7, 7, 6, 1, 5, 8, 7, 6]), 1) == [2], "after the most equal tokens"
    assert guessed(own, sample(4, [0, 8, 7, 6]), 1) == [3], "the newest"
    assert guessed(own, sample(0, [7, 7, 6], other), 2) == [1, 5], "of another prompt, too"
    assert guessed(own, sample(1, [7, 7, 6], other._replace(tenant=3)), 1) == [], "but not of another tenant"


def by_definition(steps, earlier, most):
    """What is guessed after each step: a search through all places that were shown, the newest first."""
    begin = list(REQUEST.tokens[-16:])
    places, grown, guesses = [], {}, []

    def show(text, first):
        places.extend((text, place) for place in range(first, len(text)))

    show(list(REQUEST.tokens), 0)
    for one in earlier:
        show([*begin, *one.tokens], 16)
    for number, tokens in steps:
        text = grown.setdefault(number, list(begin))
        text += tokens
        show(text, len(text) - len(tokens))
        new, own = text[16:], [one.tokens for one in earlier if one.sample == number]
        old, at = list(own[-1]) if own else [], len(new)
        if at < len(old) and old[max(0, at - 3) : at] == new[-3:]:
            guesses.append(old[at:][:most])
            continue
        same = [one for one in places[::-1] if one[1] >= 3 and one[0][one[1] - 3 : one[1]] == text[-3:]][:16]
        equal = [max(k for k in range(3, 17) if k <= p and known[p - k : p] == text[-k:]) for known, p in same]
        known, place = same[equal.index(max(equal))] if same else ([], 0)
        guess = known[place:][:most]
        guesses.append((guess * most)[:most] if known is text else guess)
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


def test_where_places_do_not_agree_less_is_guessed_than_where_they_do():
    """After the same number of equal tokens: 4 of 4 places against 1 of 4."""
    own, one = drafter(), sample(0, [0])
    for turn in range(40):
        sure, odd = [50, 51, 52, 53], [60, 61, 62, 70 + turn]
        for begin in (sure, odd):
            one.new += begin[:3]
            own.guess(one, 9, 0.0)
            one.new += [begin[3], 1000 + turn]
            own.saw(one)
    one.new += [50, 51, 52]
    assert own.guess(one, 1, 0.8) == [53]
    one.new += [53, 999, 60, 61, 62]
    assert own.guess(one, 1, 0.8) == []
    assert own.guess(one, 1, 0.0) == [109]


def test_the_oldest_tokens_are_forgotten(monkeypatch):
    monkeypatch.setattr(texts, "_MOST", 200)
    own, first = drafter([said(1, [7] * 40)]), sample(0, [1, 2, 3, 4] * 4)
    assert guessed(own, first, 2) == [1, 2]
    assert guessed(own, sample(4, [9, 7, 7, 7]), 2) == [], "earlier samples of a prompt are an eighth at most"
    again = REQUEST._replace(number=5)
    for number in range(5, 9):
        guessed(own, sample(number, [number] * 30, again), 2)
    assert guessed(own, sample(9, [1, 2, 3], again), 1) == [4]
    for number in range(20, 24):
        guessed(own, sample(number, [number] * 30, again), 2)
        assert own._texts._size <= 100
    assert guessed(own, sample(13, [1, 2, 3], again), 1) == []
    assert guessed(own, sample(14, [23, 23, 23], again), 1) == [23]
    assert len(own._live) < 8, "nor are samples held that have long ended"


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
