"""Played rollouts against a rank that runs one decode step after the other and counts everything anew."""

from dataclasses import replace

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.plugins.rollout import (
    Expected,
    InOrder,
    LengthDistributions,
    Rollout,
    RolloutCosts,
    RolloutRequest,
    TieQueue,
    plan_rollout,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 40
COSTS = RolloutCosts(1.0, 0.1, 0.01, 0.05)


class PlainRank:
    """A rank step by step: lists, and sums over all samples at every step."""

    def __init__(self, rollout, order):
        self.of, self.waiting, self.live, self.open = rollout, list(order), [], True
        self.tokens = {sample: int(rollout.request.done[sample]) for sample in order}
        self.ends = {}
        self.now_s, self.most_keys, self.evicted = 0.0, 0, 0

    def prompt(self, sample):
        return int(self.of.request.prompt_tokens[self.of.request.prompts[sample]])

    def keys(self):
        return sum(self.prompt(sample) + self.tokens[sample] for sample in self.live)

    def room(self, sample, tokens):
        reserve = LIMIT if self.of.reserve is None else int(self.of.reserve[sample])
        return self.prompt(sample) + max(reserve, tokens + 1)

    def let_in(self):
        while self.open and self.waiting and len(self.live) < self.of.request.slots:
            sample = self.waiting[0]
            held = max(self.keys(), sum(self.room(each, 0) for each in self.live))
            if self.live and held + self.room(sample, self.tokens[sample]) > self.of.request.cap_tokens:
                return
            self.live.append(self.waiting.pop(0))
            self.now_s += self.of.costs.prompt_s * (self.prompt(sample) + self.tokens[sample])

    def step(self):
        self.let_in()
        if not self.live:
            return False
        while self.keys() + len(self.live) > self.of.request.cap_tokens:
            self.waiting.insert(0, self.live.pop())
            self.open = False
            self.evicted += 1
        costs = self.of.costs
        self.now_s += costs.step_s + costs.row_s * len(self.live) + costs.key_s * self.keys()
        for sample in self.live:
            self.tokens[sample] += 1
        self.most_keys = max(self.most_keys, self.keys())
        for sample in [each for each in self.live if self.tokens[each] == self.of.lengths[each]]:
            self.live.remove(sample)
            self.ends[sample] = self.now_s
            self.open = True
        return True


@st.composite
def rollouts(draw):
    """Rollouts with tight caps, reserves of any size and samples that have some tokens."""
    count = draw(st.integers(1, 14))
    prompts = np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    tokens = np.array(draw(st.lists(st.integers(1, 20), min_size=3, max_size=3)))
    lengths = np.array(draw(st.lists(st.integers(1, LIMIT), min_size=count, max_size=count)))
    done = np.array([draw(st.integers(0, int(n) - 1)) for n in lengths])
    cap = int(tokens.max()) + LIMIT + draw(st.integers(0, 120))
    request = RolloutRequest(prompts, tokens, draw(st.integers(1, 3)), LIMIT, draw(st.integers(1, 5)), cap, done)
    reserve = draw(st.sampled_from([None, np.full(count, 1), np.full(count, 15)]))
    return Rollout(request, lengths, COSTS, reserve)


@given(rollouts(), st.sampled_from([None, 7, 30]))
def test_jumping_from_event_to_event_is_stepping(rollout, most_steps):
    plan = spread(rollout.request)
    played = rollout.play(plan, most_steps)
    evicted = 0
    for rank, own in enumerate(plan.ranks):
        plain = PlainRank(rollout, own.tolist())
        steps = 0
        while (most_steps is None or steps < most_steps) and plain.step():
            steps += 1
        assert played.rank_s[rank] == pytest.approx(plain.now_s)
        assert played.most_keys[rank] == plain.most_keys <= rollout.request.cap_tokens
        evicted += plain.evicted
        for sample in own.tolist():
            assert played.tokens[sample] == plain.tokens[sample]
            assert np.isnan(played.end_s[sample]) == (sample not in plain.ends)
            assert sample not in plain.ends or played.end_s[sample] == pytest.approx(plain.ends[sample])
    assert played.num_evicted == evicted
    assert rollout.reserve is not None or evicted == 0, "who reserves the limit sends nobody back"


@given(rollouts(), st.integers(1, 9))
def test_every_sample_ends_once_however_often_it_is_carried_on(rollout, every):
    known = LengthDistributions(np.full(3, 2.5), np.full(3, 0.6), LIMIT)
    tokens = rollout.play(plan_rollout(rollout.request, known)).tokens
    np.testing.assert_array_equal(tokens, rollout.lengths)
    left, tokens, num_ends = np.arange(len(tokens)), rollout.request.done.copy(), 0
    while len(left):
        request = replace(rollout.request, prompts=rollout.request.prompts[left], done=tokens[left])
        part = Rollout(request, rollout.lengths[left], COSTS).play(plan_rollout(request, known), every)
        assert (part.tokens >= tokens[left]).all(), "no token is lost"
        tokens[left] = part.tokens
        num_ends += int((~np.isnan(part.end_s)).sum())
        left = left[np.isnan(part.end_s)]
    np.testing.assert_array_equal(tokens, rollout.lengths)
    assert num_ends == len(tokens)


@given(rollouts(), st.integers(0, 1000), st.sampled_from(["first", "tie"]))
def test_who_comes_later_is_served_and_nobody_before_he_comes(rollout, seed, kind):
    arrivals = np.random.default_rng(seed).exponential(9.0, len(rollout.lengths)).cumsum()
    lengths = rollout.lengths.astype(np.float64)
    queue = InOrder() if kind == "first" else TieQueue(Expected(lengths, lengths, lengths**2), rollout.request.slots)
    played = rollout.serve(queue, arrivals)
    left = rollout.lengths - rollout.request.done
    assert (played.end_s >= arrivals + left * (COSTS.step_s + COSTS.row_s) - 1e-9).all()
    np.testing.assert_array_equal(played.tokens, rollout.lengths)
    assert played.most_keys[0] <= rollout.request.cap_tokens


def test_a_request_that_comes_to_an_idle_rank_begins_at_once():
    request = RolloutRequest(np.zeros(3, int), np.array([5]), 1, LIMIT, 2, 1000)
    rollout = Rollout(request, np.array([10, 10, 10]), COSTS._replace(key_s=0.0, prompt_s=0.0))
    end_s = rollout.serve(InOrder(), np.array([0.0, 2.5, 100.0])).end_s
    # Alone 1.1 s a step: three until 2.5 s have passed, then seven of 1.2 s, then the second's last three alone.
    assert end_s == pytest.approx([3.3 + 8.4, 3.3 + 8.4 + 3.3, 111.0])


@pytest.mark.parametrize("lengths", [[5], [0, 5], [5, LIMIT + 1]])
def test_lengths_of_other_samples_are_refused(lengths):
    request = RolloutRequest(np.zeros(2, int), np.array([5]), 1, LIMIT, 2, 1000)
    with pytest.raises(EvenloadError, match="not those of the samples"):
        Rollout(request, np.array(lengths), COSTS)
