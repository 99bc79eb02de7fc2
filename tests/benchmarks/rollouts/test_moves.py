"""A rollout whose samples are dealt again while they live, played: none is lost, and idle ranks get some."""

from __future__ import annotations

import numpy as np
from evenload.benchmarks.rollouts.moves import play_moved
from evenload.plugins.rollout import H100_7B, LengthDistributions, Rollout, RolloutRequest, spread


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
    again = Rollout(request, lengths, H100_7B._replace(prompt_s=1e-2))
    assert 0 < play_moved(again, known, 256).num_moves < moved.num_moves / 4
