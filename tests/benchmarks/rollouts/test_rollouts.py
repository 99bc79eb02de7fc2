"""TIE and rollouts on ranks in quick mode: orders that know more wait less, and what is dealt evenly ends sooner."""

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
