"""Samples are dealt once each, alike on every rank; what fails or is late is spread, and said."""

import logging

import numpy as np
import pytest
from evenload.core.errors import RankError
from evenload.core.plan.step_plan import Slice
from evenload.runtime.generate import dealing as dealings
from evenload.runtime.generate.dealing import Dealer, Dealing, Forwards, SampleAssignment, again, agreed
from evenload.runtime.generate.request import Generation, Request
from hypothesis import given
from hypothesis import strategies as st

REQUESTS = [Request(4, (1, 2), 9, (0, 1, 5)), Request(7, (3,), 30, (2,))]
DEALING = Dealing.of_requests(REQUESTS, Generation(slots=3), 2)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 4)), max_size=12), st.integers(1, 7))
def test_samples_are_spread_once_each_longest_limit_first(prompts, ranks):
    requests = [Request(i, (1,), limit, tuple(range(count))) for i, (limit, count) in enumerate(prompts)]
    dealing = Dealing.of_requests(requests, Generation(), ranks)
    dealt = Dealer().deal(dealing)
    assert sorted(i for own in dealt.ranks for i in own) == list(range(sum(count for _, count in prompts)))
    assert max(map(len, dealt.ranks)) - min(map(len, dealt.ranks)) <= 1
    for own in dealt.ranks:
        limits = dealing.limits[own].tolist()
        assert limits == sorted(limits, reverse=True)
    for place in range(len(requests)):
        counts = [int((dealing.of[own] == place).sum()) for own in dealt.ranks]
        assert max(counts) - min(counts) <= 1


class Odd(Dealer):
    """Deals as it is told to."""

    def __init__(self, ranks):
        self._ranks = ranks

    def deal(self, dealing):
        if isinstance(self._ranks, Exception):
            raise self._ranks
        return SampleAssignment(tuple(np.array(own, dtype=np.int64) for own in self._ranks), "odd")


@pytest.mark.parametrize("ranks", [((0, 1), (1, 3)), ((0, 1), (2,)), ((0, 1, 2, 3),), ValueError("no plan")], ids=str)
def test_a_dealing_that_fails_is_spread_and_under_way_left_as_it_is(ranks, caplog):
    with caplog.at_level(logging.WARNING, "evenload"):
        dealt = agreed(Odd(ranks), DEALING)
    assert (dealt.dealer, dealt.digest) == ("spread", Dealer().deal(DEALING).digest)
    assert "spread over ranks, as dealing them failed on rank 0" in caplog.text
    here = Dealing(**{**vars(DEALING), "ranks": np.array([1, 0, 0, 1]), "ended": np.array([0, 1, 0, 0])})
    stays = again(Odd(ranks), here, dealt._replace(forwards=np.array([4, 5])))
    assert [own.tolist() for own in stays.ranks] == [[2], [0, 3]]
    assert "samples stay on their ranks" in caplog.text


def test_a_dealing_that_is_late_is_spread(monkeypatch, caplog):
    monkeypatch.setattr(dealings, "LATE_S", 0.0)

    class Slow(Dealer):
        def deal(self, dealing):
            never.wait(20)
            raise AssertionError

    never = dealings.threading.Event()
    with caplog.at_level(logging.WARNING, "evenload"):
        assert agreed(Slow(), DEALING).dealer == "spread"
    never.set()
    assert "nothing within 0 s" in caplog.text


def test_ranks_that_are_told_different_things_end_together(monkeypatch):
    other = Dealer().deal(DEALING)._replace(forwards=np.array([3, 4])).digest

    def gather(payload, group=None):
        return [payload, payload if len(payload) == 1 else other]

    monkeypatch.setattr(dealings, "gather_bytes", gather)
    monkeypatch.setattr("evenload.runtime.world.agreement.gather_bytes", gather)
    with pytest.raises(RankError, match="different dealings of samples"):
        agreed(Dealer(), DEALING)


def test_forwards_count_tokens_of_samples_and_of_prompts():
    work = Forwards().plus([Slice(0, 0, 12), Slice(1, 7, 8), Slice(2, 3, 4)]).plus([Slice(1, 8, 9)]).plus([])
    assert work == Forwards(forwards=3, samples=3, keys=8 + 4 + 9, prompt_tokens=12)
    drafted = Forwards().plus([Slice(0, 0, 12), Slice(1, 7, 11), Slice(2, 3, 4)], {1: 3})
    assert drafted == Forwards(forwards=1, samples=4 + 1, keys=11 + 4, prompt_tokens=12)
