"""TIE and SART in quick mode: orders that know more wait less, and what a rule of SART saves and bends."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_orders_that_know_lengths_wait_less_than_first_come(benchmark):
    online, offline = benchmark("published/tie.py", "--quick")["rows"]
    for row in (online, offline):
        seconds = row["seconds"]
        assert seconds["oracle"] < min(seconds["E"], seconds["TIE"]) < seconds["fcfs"]
        assert row["gain"]["TIE"] == pytest.approx(seconds["fcfs"] / seconds["TIE"])
    assert online["waited_s"]["E"] < online["waited_s"]["fcfs"]
    assert 0.3 < online["share_of_longest_tenth"] < 0.45


def test_fewer_samples_are_as_right_and_shorter(benchmark):
    result = benchmark("rollouts/sart.py", "--quick")
    rows = {(row["kind"], row["by"]): row for row in result["rows"]}
    whole, some = rows["all of N", "wait"], rows["M of N", "wait"]
    assert whole["work_gain"] == whole["wait_gain"] == 1
    assert some["wait_gain"] > 1
    assert some["right"] >= whole["right"] - 0.005
    assert some["kept_tokens"] < some["mean_tokens"]
    assert rows["M of N, pruned", "work"]["kept_score"] > some["kept_score"]
    honest, *bent = result["gradients"]
    assert honest["gradient"] == pytest.approx(-0.1, abs=4 * honest["error"])
    assert all(row["gradient"] > -0.1 + 4 * row["error"] for row in bent), "what ends first bends a gradient"
    assert result["order_statistics"]["one_fewer"] < 0.9 <= result["order_statistics"]["chance"]


def test_spreading_gains_over_groups_and_moving_more(benchmark):
    result = benchmark("rollouts/ranks.py", "--quick")
    (row,) = result["rows"]
    seconds = row["rollout_s"]
    assert seconds["bound"] < seconds["moved"] <= seconds["sent"] < seconds["groups"]
    assert seconds["bound"] <= seconds["graded"] * (1 + 1e-9)
    assert seconds["graded"] <= seconds["oracle"]
    assert seconds["moved"] < seconds["computed"]
    assert seconds["spread"] < seconds["groups"]
    assert row["gain"]["groups"] == 1
    assert all(0 <= idle < 1 for idle in row["idle"].values())
