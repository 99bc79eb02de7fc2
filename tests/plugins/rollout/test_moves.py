"""Samples that live, dealt again at borders: even, few, at their price, alike everywhere, and none lost."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.plugins.rollout import (
    H100_7B,
    LengthDistributions,
    Rollout,
    RolloutRequest,
    bound_of,
    check_rollout,
    levelled,
    move,
    spread,
    steps_of,
)
from hypothesis import example, given
from hypothesis import strategies as st

KNOWN = LengthDistributions(np.array([5.0, 7.0, 9.0]), np.full(3, 0.4), 4096)


def alive(seed, num_ranks, slots, count):
    """Samples that have some tokens, and the ranks that they are on."""
    draw = np.random.default_rng(seed)
    prompts, done = draw.integers(0, 3, count), draw.integers(0, 4095, count)
    request = RolloutRequest(prompts, np.array([20, 300, 5]), num_ranks, 4096, slots, 1 << 20, done)
    return request, draw.integers(0, num_ranks, count)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 99))
@example([68, 2, 1, 1, 1, 1], 3, 65)  # a sample moves on from where it has moved to
def test_moves_even_what_is_left_and_never_worsen_it(left, num_ranks, seed):
    seconds = np.array(left, np.float64)
    draw = np.random.default_rng(seed)
    ranks, price = draw.integers(0, num_ranks, len(left)), draw.integers(0, 300, len(left)).astype(np.float64)
    before = np.bincount(ranks, seconds, num_ranks)
    now = levelled(ranks, seconds, num_ranks)
    after = np.bincount(now, seconds, num_ranks)
    assert after.max() <= before.max()
    assert after.sum() == pytest.approx(before.sum())
    assert after.max() - after.min() <= max(seconds.max(), 0.02 * after.mean()) + 1e-9
    paid = levelled(ranks, seconds, num_ranks, price)
    loads = np.bincount(paid, seconds + price * (paid != ranks), num_ranks)
    assert loads.max() <= before.max()
    dear = levelled(ranks, seconds, num_ranks, np.full(len(left), 1e9))
    np.testing.assert_array_equal(dear, ranks)


@given(st.integers(0, 999), st.integers(1, 8), st.integers(1, 9), st.integers(1, 60), st.integers(1, 500))
def test_each_sample_goes_on_once_for_equally_long(seed, num_ranks, slots, count, every):
    request, ranks = alive(seed, num_ranks, slots, count)
    moved = move(request, ranks, KNOWN, H100_7B, every)
    check_rollout(moved.plan, request)
    np.testing.assert_array_equal(moved.plan.of_samples, moved.ranks)
    assert move(request, ranks, KNOWN, H100_7B, every).plan.digest == moved.plan.digest
    assert moved.steps.min() >= 1
    begun = request.done > 0
    for own in moved.plan.ranks:
        assert sorted(begun[own].tolist(), reverse=True) == begun[own].tolist()


def test_ranks_run_as_many_steps_as_take_them_equally_long():
    request = RolloutRequest(np.zeros(66, int), np.array([50]), 2, 8192, 64, 1 << 20, np.full(66, 4000))
    ranks = np.r_[np.zeros(64, int), np.ones(2, int)]
    steps = steps_of(ranks, request, H100_7B, 200)
    assert steps[0] < 200 < steps[1]
    part = Rollout(request, np.full(66, 8000), H100_7B)
    seconds = part.play(move_nothing(request, ranks), steps).rank_s
    assert seconds[0] == pytest.approx(seconds[1], rel=0.03)
    assert part.play(move_nothing(request, ranks), 200).rank_s.max() > 1.3 * seconds.min()


def move_nothing(request, ranks):
    """A plan by ranks."""
    return replace(spread(request), ranks=tuple(np.flatnonzero(ranks == rank) for rank in range(request.num_ranks)))


def test_few_samples_in_a_step_raise_the_bound_and_equal_ones_reach_it():
    request = RolloutRequest(np.zeros(8, int), np.array([20]), 2, 512, 64, 1 << 20)
    lengths, costs = np.full(8, 100), H100_7B._replace(key_s=0.0)
    bound = bound_of(request, lengths, costs)
    assert bound.bound_s == bound.crowded_s > 2 * bound.shared_s
    assert Rollout(request, lengths, costs).play(spread(request)).rank_s.max() == pytest.approx(bound.bound_s)
    keys = bound_of(request, lengths, H100_7B)
    assert Rollout(request, lengths, H100_7B).play(spread(request)).rank_s.max() == pytest.approx(
        keys.bound_s, rel=1e-3
    )


def test_limits_of_prompts_cut_what_is_expected_of_them():
    own = LengthDistributions(KNOWN.mu, KNOWN.sigma, np.array([100, 4096, 200]))
    request, _ = alive(0, 2, 4, 30)
    request = replace(request, done=np.zeros(30, int))
    longest = move(request, np.zeros(30, int), own, H100_7B, 8)
    assert longest.plan.of_samples[request.prompts == 1].size
    with pytest.raises(Exception, match="not distributions"):
        LengthDistributions(KNOWN.mu, KNOWN.sigma, np.array([100, 0, 200]))
