"""Samples dealt again while they live: even, few, and none lost."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from evenload.plugins.rollout import H100_7B, LengthDistributions, Rollout, RolloutRequest, spread
from hypothesis import given
from hypothesis import strategies as st

MOVES = runpy.run_path(str(Path(__file__).resolve().parents[3] / "benchmarks" / "rollouts" / "moves.py"))
levelled, play_moved = MOVES["levelled"], MOVES["play_moved"]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 99))
def test_moves_even_what_is_left_and_never_worsen_it(left: list[int], num_ranks: int, seed: int) -> None:
    seconds = np.array(left, np.float64)
    ranks = np.random.default_rng(seed).integers(0, num_ranks, len(left))
    now = levelled(ranks, seconds, num_ranks)
    before, after = (np.bincount(of, seconds, num_ranks) for of in (ranks, now))
    assert after.max() <= before.max()
    assert after.sum() == pytest.approx(before.sum())
    assert after.max() - after.min() <= max(seconds.max(), 0.02 * after.mean()) + 1e-9


def test_moves_bring_a_lonely_tail_to_idle_ranks() -> None:
    """By chance one rank has all that is long, of a prompt that is known."""
    request = RolloutRequest(np.zeros(64, int), np.array([50]), 2, 4096, 64, 1 << 20)
    lengths = np.where(np.arange(64) % 2, 3000, 100)
    known = LengthDistributions(np.full(1, 6.0), np.full(1, 1.0), 4096)
    rollout = Rollout(request, lengths, H100_7B)
    alone = rollout.play(spread(request)).rank_s.max()
    moved = play_moved(rollout, known, 256, move_s=1e-7)
    assert moved.num_moves > 0
    assert moved.moved_keys > 0
    np.testing.assert_array_equal(moved.tokens, lengths)
    assert moved.busy_s <= moved.seconds < 0.96 * alone
