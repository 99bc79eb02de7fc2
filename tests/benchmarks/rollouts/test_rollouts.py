"""Rollouts on ranks: orders that know more wait less, what is dealt evenly ends sooner, and what moves is not lost."""

from __future__ import annotations

import json

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


COSTS = """
source: a test
forward: {token_s: 1.0e-6}
backward: {token_s: 2.0e-6}
decode: {step_s: 1.0e-2, row_s: 1.0e-3, key_s: 1.0e-5, prompt_s: 1.0e-6}
"""


def test_every_dealing_computes_the_same_samples(ran, tmp_path):
    (tmp_path / "c.yaml").write_text(COSTS)
    words = ("--costs", "c.yaml", "--prompts", 3, "--samples", 3, "--limit", 24, "--every", 4, "--draws", 1)
    rows = json.loads(ran("rollouts/dealings.py", *words, ranks=2, folder=tmp_path).stdout)["rows"]
    assert [row["name"] for row in rows] == ["groups", "spread", "tie", "spread, moved", "tie, moved"]
    tokens = {sum(row["tokens"]) + row["moved"] for row in rows}
    assert len(tokens) == 1, "the pass that computes a moved sample again gives its next token"
    for row in rows:
        assert row["predicted_s"] >= row["bound_s"] > 0
        assert 0 <= row["idle"] < 1
        assert (row["moved"] > 0) <= ("moved" in row["name"])
