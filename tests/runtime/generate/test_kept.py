"""Which samples are kept is a function of the samples: it is that of plain generation, whatever is computed beside."""

from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.rollout import Collect, Collected, Prune
from evenload.runtime.generate.drafts import Drafts
from evenload.runtime.generate.engine import generate
from evenload.runtime.generate.request import Generation, Request
from evenload.training.proof.drafters import Guessing
from harness.cases import full
from hypothesis import given, settings

from ...plugins.rollout.plain_rule import plain
from . import tiny

MODEL = tiny.Tiny()
PLAIN = Generation(seed=3, end_tokens=frozenset({5, 17}))
OF = 5
REQUESTS = [Request(number, tuple(range(1, 2 + 5 * number)), 26 - number, tuple(range(OF))) for number in range(5)]
NEVER = 1 << 40
RULES = {
    "the first two": Collect(2, OF, NEVER),
    "all": Collect(OF, OF, NEVER),
    "pruned": Collect(2, OF, 4, Prune(0.5, 2)),
    "pruned at every token": Collect(1, OF, 1, Prune(0.6, 4)),
    "pruned after the first": Collect(3, OF, 3, Prune(-1.0, 0)),
}


@cache
def whole_samples():
    return tiny.one_by_one(MODEL.whole, REQUESTS, PLAIN)


def score(tokens):
    return sum((place + 1) * token for place, token in enumerate(tokens)) * 37 % 101 / 101


def scores(samples):
    return [score(sample.tokens) for sample in samples]


def made(rule, requests, drafter=None, **more):
    wants = rule.prune is not None
    how = replace(PLAIN, collect=Collected(rule), scores=scores if wants else None, **more)
    model = tiny.Tiny()
    out = list(generate(requests, how, model.decoder(), None, Drafts(drafter)))
    assert len(out) == len({one[:2] for one in out}) == sum(len(request.samples) for request in requests)
    assert model.tables.num_taken == 0
    return {one[:2]: one for one in out}


def refuse_other(got, rule):
    for request in REQUESTS:
        samples = [whole_samples()[request.number, i] for i in range(OF)]
        lengths = [len(sample.tokens) for sample in samples]
        borders = range(max(lengths) // rule.every + 2)
        at = {(i, b): score(one.tokens[: b * rule.every]) for i, one in enumerate(samples) for b in borders}
        kept, pruned = plain(rule, lengths, at)
        own = [got[request.number, i] for i in range(OF)]
        assert {one.sample for one in own if one.kept} == set(kept)
        assert {one.sample for one in own if one.ended == "pruned"} == set(pruned)
        for one, whole in zip(own, samples, strict=True):
            assert one.tokens == whole.tokens[: len(one.tokens)]
            if one.kept or one.ended not in ("pruned", "left"):
                assert (one.tokens, one.ended) == (whole.tokens, whole.ended)
            if rule.prune and one.kept:
                assert one.score == score(whole.tokens)


MORE = [
    {"slots": 1},
    {"slots": 3, "step_tokens": 5},
    {"slots": 64},
    {"slots": 7, "cache_tokens": 80},
]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(name, more, marks=() if name == "pruned" or at == own % len(MORE) else full)
        for own, name in enumerate(RULES)
        for at, more in enumerate(MORE)
    ],
    ids=str,
)
def test_what_is_kept_is_that_of_plain_samples(name, more):
    refuse_other(made(RULES[name], REQUESTS, **more), RULES[name])


def test_every_order_and_every_number_of_ranks_keeps_the_same():
    rule = RULES["pruned"]
    for slots in (1, 4):
        refuse_other(made(rule, REQUESTS[::-1], slots=slots), rule)
    for ranks in (2, 3):
        parts = [made(rule, REQUESTS[rank::ranks]) for rank in range(ranks)]
        refuse_other({key: one for part in parts for key, one in part.items()}, rule)


@pytest.mark.parametrize("name", RULES)
def test_drafts_change_nothing_of_what_is_kept(name):
    texts = {key: one.tokens for key, one in whole_samples().items()}
    for more in MORE[1:3]:
        refuse_other(made(RULES[name], REQUESTS, Guessing(tiny.VOCABULARY, texts), **more), RULES[name])


@settings(max_examples=settings.default.max_examples // 4)
@given(
    st.integers(1, OF),
    st.integers(1, 9),
    st.none() | st.builds(Prune, st.floats(-0.1, 1.1), st.integers(0, OF)),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_no_slots_and_no_cap_change_what_is_kept(keep, every, prune, slots, spare):
    rule = Collect(keep, OF, every if prune else NEVER, prune)
    largest = max(len(request.tokens) + request.limit for request in REQUESTS)
    refuse_other(made(rule, REQUESTS, slots=slots, cache_tokens=(-(-largest // 16) + 1 + spare) * 16), rule)


def test_less_is_computed_than_all_samples_have():
    spent = {name: sum(len(one.tokens) for one in made(rule, REQUESTS).values()) for name, rule in RULES.items()}
    assert spent["all"] == sum(len(one.tokens) for one in whole_samples().values())
    assert spent["the first two"] < 0.7 * spent["all"]
    assert spent["pruned"] < spent["the first two"]


def test_a_rank_that_has_some_of_the_samples_refuses_to_choose():
    with pytest.raises(EvenloadError, match="of which it has not all"):
        made(RULES["pruned"], [request._replace(samples=(0, 2)) for request in REQUESTS])
