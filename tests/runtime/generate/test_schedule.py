"""Laws of the schedule alone, without a model: what is written into blocks is followed token by token."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from evenload.runtime.attention.block_tables import BlockTables
from evenload.runtime.attention.kv_cache import KvCache
from evenload.runtime.generate.request import Generation, Request
from evenload.runtime.generate.schedule import Schedule
from hypothesis import example, given

BLOCK = 4
Context = tuple[int, ...]
"""A token with all that stands before it: what its key and value depend on."""


class Followed(KvCache):
    """A cache that holds, in place of keys and values, the tokens that they were computed from."""

    def __init__(self, cap):
        super().__init__(BlockTables(BLOCK, cap))
        self.held = {}

    def copy_block(self, source, target):
        for place in range(BLOCK):
            self.held[target, place] = self.held.get((source, place), ())

    def place(self, key, token):
        return self.tables[key][token // BLOCK], token % BLOCK


class Play:
    """Runs a schedule as the engine does, with tokens that are a function of what stands before them."""

    def __init__(self, requests, how, ends):
        self.cache = Followed(how.cache_tokens)
        self.schedule = Schedule(requests, how, self.cache)
        self.how, self.ends, self.drafts = how, ends, False
        self.order = [(request.number, sample) for request in requests for sample in request.samples]
        self.requests = {request.number: request for request in requests}
        self.done = {}
        self.computed = Counter[Any]()

    def steps(self):
        while self.schedule.busy:
            before = self._head()
            self.live = None
            slices, samples, tokens = self.schedule.next(self._draft)
            assert self.live in (None, self.schedule.live), "somebody is given up for a guess"
            self._refuse_beyond_caps(slices, samples)
            for piece in slices:
                self._write(piece, tokens[piece.sequence])
            self.schedule.computed()
            assert self._head()[1] > before[1], "who comes first goes on in every step"
            for sample in samples:
                self._take(sample)
            yield

    def _draft(self, sample):
        """What comes next, but for one token, and then what never comes, up to the limit."""
        self.live = [*self.schedule.live]
        text = [*plain(sample.request, self.ends), *[-1] * sample.request.limit][len(sample.new) :]
        draw = hash((*sample.request.tokens, sample.number, *sample.new))
        guess = [-1 if place == draw % 5 else token for place, token in enumerate(text)]
        left = sample.request.limit - len(sample.new) - 1
        return guess[: min(left, draw // 5 % 9) if self.drafts else 0]

    def _head(self):
        """The first sample of all that has not ended, and how far it is."""
        first = next(key for key in self.order if key not in self.done)
        for sample in self.schedule.live:
            if (sample.request.number, sample.number) == first:
                waits = sample.prefill
                return first, sample.kept if waits is None else waits.kept
        return first, -1

    def _refuse_beyond_caps(self, slices, samples):
        tables, how = self.cache.tables, self.how
        assert how.cache_tokens is None or tables.num_taken * BLOCK <= how.cache_tokens
        assert len(self.schedule.live) <= how.slots
        assert len(samples) <= how.slots
        drafted = {sample.key: len(sample.drafted) for sample in samples}
        lengths = [piece.length - drafted.get(piece.sequence, 0) for piece in slices]
        assert sum(length for length in lengths if length > 1) <= how.step_tokens
        assert len({piece.sequence for piece in slices}) == len(slices) > 0

    def _write(self, piece, tokens):
        """Whoever has the blocks, behind this each holds its own tokens up to here."""
        key = piece.sequence
        part = next(one for one in self._parts() if one.key == key)
        own = [*part.request.tokens, *getattr(part, "new", ()), *getattr(part, "drafted", ())]
        assert list(tokens) == own[piece.start : piece.stop]
        for place in range(piece.stop):
            if place >= piece.start:
                self.cache.held[self.cache.place(key, place)] = tuple(own[: place + 1])
            assert self.cache.held[self.cache.place(key, place)] == tuple(own[: place + 1])

    def _parts(self):
        return [*self.schedule.live, *self.schedule._prefills.values()]

    def _take(self, sample):
        for one in self._parts():  # nobody's tokens were written over by a step
            kept = [*one.request.tokens, *getattr(one, "new", ())][
                : one.kept if getattr(one, "prefill", None) is None else 0
            ]
            assert all(self.cache.held[self.cache.place(one.key, p)] == tuple(kept[: p + 1]) for p in range(len(kept)))
        before = len(sample.new)
        for guess in (*sample.drafted, None):
            sample.new.append(hash((*sample.request.tokens, *sample.new)) % self.ends)
            sample.log_probs.append(0.0)
            if sample.new[-1] != guess or sample.new[-1] == 0 or len(sample.new) == sample.request.limit:
                break
        self.schedule.grew(sample, len(sample.new) - before - 1)
        assert len(self.cache.tables[sample.key]) <= self.cache.tables.size(sample.length)
        key = sample.request.number, sample.number
        if sample.new[-1] == 0 or len(sample.new) == sample.request.limit:
            assert key not in self.done
            self.done[key] = tuple(sample.new)
            self.schedule.end(sample)


def starved():
    """A prompt that begins again while a sample that started later computes what it had."""
    sizes = [(1, 1, 1), (1, 1, 1), (1, 1, 1), (3, 3, 3), (1, 3, 1)]
    requests = [
        Request(n, tuple(range(100 * n, 100 * n + prompt)), limit, tuple(range(of)))
        for n, (prompt, limit, of) in enumerate(sizes)
    ]
    return Play(requests, Generation(slots=4, cache_tokens=16, step_tokens=1), 2)


def plain(request, ends):
    own = []
    while len(own) < request.limit and (not own or own[-1]):
        own.append(hash((*request.tokens, *own)) % ends)
    return tuple(own)


@st.composite
def plays(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6))
    requests = [
        Request(number, tuple(range(100 * number, 100 * number + length)), limit, tuple(range(samples)))
        for number, (length, limit, samples) in enumerate(sizes)
    ]
    least = max(-(-(length + limit) // BLOCK) for length, limit, _ in sizes) + 1
    cap = draw(st.none() | st.integers(least, least + 8).map(lambda blocks: blocks * BLOCK))
    how = Generation(slots=draw(st.integers(1, 9)), cache_tokens=cap, step_tokens=draw(st.integers(1, 12)))
    return Play(requests, how, draw(st.integers(2, 12)))


@example(starved(), False)
@given(plays(), st.booleans())
def test_every_sample_ends_once_with_its_own_tokens_and_nothing_is_left_behind(play, drafts):
    play.drafts = drafts
    steps = sum(1 for _ in play.steps())
    assert play.done == {
        (number, sample): plain(request, play.ends)
        for number, request in play.requests.items()
        for sample in request.samples
    }
    # Each step brings the first sample on by a token, so nobody waits for longer than all before it take alone.
    assert steps <= sum(len(play.requests[number].tokens) + len(new) for (number, _), new in play.done.items())
    assert play.cache.tables.num_taken == 0


@given(plays(), st.integers(1, 30))
def test_what_an_interruption_meets_has_ended_or_is_carried(play, most):
    for step, _ in enumerate(play.steps(), 1):
        left = [(one.request.number, one.number) for one in (*play.schedule.live, *play.schedule.waiting)]
        assert sorted([*left, *play.done]) == sorted(play.order)
        if step == most:
            break
    for one in (*play.schedule.live, *play.schedule.waiting):
        assert tuple(one.new) == plain(one.request, play.ends)[: len(one.new)]
