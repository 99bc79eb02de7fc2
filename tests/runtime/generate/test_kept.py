"""Which samples are kept is a function of the samples: it is that of plain generation, whatever is computed beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.rollout import Collect, Collected, Prune
from evenload.runtime.generate.engine import generate
from evenload.runtime.generate.request import Completion, Generation, Request
from hypothesis import given

_spec = importlib.util.spec_from_file_location("tiny_kept", Path(__file__).with_name("tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

MODEL = tiny.Tiny()
PLAIN = Generation(seed=3, end_tokens=frozenset({5, 17}))
OF = 5
REQUESTS = [Request(number, tuple(range(1, 2 + 5 * number)), 26 - number, tuple(range(OF))) for number in range(5)]
WHOLE = tiny.one_by_one(MODEL.whole, REQUESTS, PLAIN)
NEVER = 1 << 40
RULES = {
    "the first two": Collect(2, OF, NEVER),
    "all": Collect(OF, OF, NEVER),
    "pruned": Collect(2, OF, 4, Prune(0.5, 2)),
    "pruned at every token": Collect(1, OF, 1, Prune(0.6, 4)),
    "pruned after the first": Collect(3, OF, 3, Prune(-1.0, 0)),
}


def score(tokens: Sequence[int]) -> float:
    return sum((place + 1) * token for place, token in enumerate(tokens)) * 37 % 101 / 101


def scores(samples: Sequence[Completion]) -> list[float]:
    return [score(sample.tokens) for sample in samples]


def plain(rule: Collect, samples: Sequence[Completion]) -> tuple[set[int], set[int]]:
    """What is kept of whole samples of a prompt, and what is pruned, border by border."""
    lengths, pruned, border = [len(sample.tokens) for sample in samples], set(), 0
    while True:
        border += rule.every
        ended = sorted((n, i) for i, n in enumerate(lengths) if n <= border and i not in pruned)
        if len(ended) >= rule.keep:
            return {i for _, i in ended[: rule.keep]}, pruned
        live = [i for i, n in enumerate(lengths) if n > border and i not in pruned]
        if rule.prune:
            bar, most = rule.prune.below, rule.prune.most - len(pruned)
            if ended:
                n, first = ended[0]
                bar, most = first_score(samples[first], n), rule.of
            spare = len(ended) + len(live) - rule.keep
            bad = sorted((score(samples[i].tokens[:border]), i) for i in live)
            pruned |= {i for value, i in bad[: max(0, min(most, spare))] if value < bar}


def first_score(sample: Completion, length: int) -> float:
    return score(sample.tokens[:length])


def made(rule: Collect, requests: Sequence[Request], **more: Any) -> dict[tuple[int, int], Completion]:
    wants = rule.prune is not None
    how = replace(PLAIN, collect=Collected(rule), scores=scores if wants else None, **more)
    model = Watched()
    out = list(generate(requests, how, model.decoder()))
    assert len(out) == len({one[:2] for one in out}) == sum(len(request.samples) for request in requests)
    assert model.tables.num_taken == 0
    return {one[:2]: one for one in out}


class Watched(tiny.Tiny):
    """Sees the blocks of the cache."""

    def logits(self, pack: Any, slots_R: Any = None) -> Any:
        self.tables = pack.cached.cache.tables
        return super().logits(pack, slots_R)


def refuse_other(got: dict[tuple[int, int], Completion], rule: Collect) -> None:
    for request in REQUESTS:
        samples = [WHOLE[request.number, i] for i in range(OF)]
        kept, pruned = plain(rule, samples)
        own = [got[request.number, i] for i in range(OF)]
        assert {one.sample for one in own if one.kept} == kept
        assert {one.sample for one in own if one.ended == "pruned"} == pruned
        for one, whole in zip(own, samples, strict=True):
            assert one.tokens == whole.tokens[: len(one.tokens)]
            if one.kept or one.ended not in ("pruned", "left"):
                assert (one.tokens, one.ended) == (whole.tokens, whole.ended)
            if rule.prune and one.kept:
                assert one.score == score(whole.tokens)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "more",
    [{"slots": 1}, {"slots": 3, "step_tokens": 5}, {"slots": 64}, {"slots": 7, "cache_tokens": 80}],
    ids=str,
)
def test_what_is_kept_is_that_of_plain_samples(name: str, more: dict[str, Any]) -> None:
    refuse_other(made(RULES[name], REQUESTS, **more), RULES[name])


def test_every_order_and_every_number_of_ranks_keeps_the_same() -> None:
    rule = RULES["pruned"]
    for slots in (1, 4):
        refuse_other(made(rule, REQUESTS[::-1], slots=slots), rule)
    for ranks in (2, 3):
        parts = [made(rule, REQUESTS[rank::ranks]) for rank in range(ranks)]
        refuse_other({key: one for part in parts for key, one in part.items()}, rule)


@given(
    st.integers(1, OF),
    st.integers(1, 9),
    st.none() | st.builds(Prune, st.floats(-0.1, 1.1), st.integers(0, OF)),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_no_slots_and_no_cap_change_what_is_kept(keep: int, every: int, prune: Any, slots: int, spare: int) -> None:
    rule = Collect(keep, OF, every if prune else NEVER, prune)
    largest = max(len(request.tokens) + request.limit for request in REQUESTS)
    refuse_other(made(rule, REQUESTS, slots=slots, cache_tokens=(-(-largest // 16) + 1 + spare) * 16), rule)


def test_less_is_computed_than_all_samples_have() -> None:
    spent = {name: sum(len(one.tokens) for one in made(rule, REQUESTS).values()) for name, rule in RULES.items()}
    assert spent["all"] == sum(len(one.tokens) for one in WHOLE.values())
    assert spent["the first two"] < 0.7 * spent["all"]
    assert spent["pruned"] < spent["the first two"]


def test_a_rank_that_has_some_of_the_samples_refuses_to_choose() -> None:
    with pytest.raises(EvenloadError, match="of which it has not all"):
        made(RULES["pruned"], [request._replace(samples=(0, 2)) for request in REQUESTS])
