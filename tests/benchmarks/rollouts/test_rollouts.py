"""Rollouts on ranks: orders that know more wait less, what is dealt evenly ends sooner, and what moves is not lost."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.benchmarks.rollouts.moves import play_moved
from evenload.plugins.rollout import H100_7B, LengthDistributions, Rollout, RolloutRequest, spread


def test_orders_that_know_lengths_wait_less_than_first_come(benchmark):
    online, offline = benchmark("published/tie.py", "--quick")["rows"]
    for row in (online, offline):
        seconds = row["seconds"]
        assert seconds["oracle"] < min(seconds["E"], seconds["TIE"]) < seconds["fcfs"]
        assert row["gain"]["TIE"] == pytest.approx(seconds["fcfs"] / seconds["TIE"])
    assert online["waited_s"]["E"] < online["waited_s"]["fcfs"]
    assert 0.3 < online["share_of_longest_tenth"] < 0.45


def test_a_cascade_is_planned_as_published_and_never_serves_less_than_one_model(benchmark):
    (row,) = benchmark("published/cascadia.py", "--quick")["rows"]
    assert sum(row["devices"]) <= 32
    assert row["most"]["ours"] >= max(row["most"]["one model"], row["most"]["equal"]) > 0
    assert row["latency"]["one model"] == pytest.approx(row["seconds"]["one model"] / row["seconds"]["ours"])
    assert row["latency"]["one model"] > 1


def test_spreading_gains_over_groups_and_moving_more(benchmark):
    (row,) = benchmark("rollouts/ranks.py", "--quick")["rows"]
    seconds = row["rollout_s"]
    assert seconds["bound"] < seconds["moved"] <= seconds["sent"] < seconds["groups"]
    assert seconds["bound"] <= seconds["graded"] * (1 + 1e-9)
    assert seconds["graded"] <= seconds["oracle"]
    assert seconds["moved"] < seconds["computed"]
    assert seconds["spread"] < seconds["groups"]
    assert row["gain"]["groups"] == 1
    assert all(0 <= idle < 1 for idle in row["idle"].values())


def test_moves_bring_a_lonely_tail_to_idle_ranks():
    """By chance one rank has all that is long, of a prompt that is known."""
    request = RolloutRequest(np.zeros(64, int), np.array([50]), 2, 4096, 64, 1 << 20)
    lengths = np.where(np.arange(64) % 2, 3000, 100)
    known = LengthDistributions(np.full(1, 6.0), np.full(1, 1.0), 4096)
    rollout = Rollout(request, lengths, H100_7B)
    alone = rollout.play(spread(request)).rank_s.max()
    moved = play_moved(rollout, known, 256, move_s=1e-7)
    assert moved.moved_keys > 0
    np.testing.assert_array_equal(moved.tokens, lengths)
    assert moved.busy_s <= moved.seconds < 0.96 * alone
    again = Rollout(request, lengths, H100_7B._replace(prompt_s=1e-2))
    assert 0 < play_moved(again, known, 256).num_moves < moved.num_moves / 4
