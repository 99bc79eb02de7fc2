"""Tables next to other people's rules and schedules, each by a small run: nobody is ahead by lawful means."""

from __future__ import annotations

import numpy as np
import pytest
from harness.cases import full


def test_mesh(benchmark, tmp_path):
    np.savetxt(
        tmp_path / "drawn.txt", np.random.default_rng(3).lognormal(6, 1.2, 2000).astype(int).clip(8, 60000), "%d"
    )
    sizes = ("--ranks", "16", "--samples", "64", "--batches", "1")
    result = benchmark("peers/mesh.py", "--lengths", tmp_path / "drawn.txt", *sizes)
    assert len(result["rows"]) == 2 * 2 * 4
    assert result["ahead"] == []


@full
def test_no_schedule_is_ahead_at_the_memory_of_a_device(benchmark):
    result = benchmark("peers/pipelines.py", "--quick")
    assert len(result["uniform"]) == 2
    for row in result["uniform"]:
        bubbles = {name: one["bubble"] for name, one in row["bubbles"].items()}
        assert min(bubbles, key=lambda name: bubbles[name]) == "evenload"
        assert 0 < bubbles["ZBV"] < bubbles["ZB-1p"] < bubbles["1F1B"]
        assert bubbles["ZB-2p"] < bubbles["ZB-1p"]
        # (P - 1) / (N + P - 1) with N sequences on P stages, whatever they cost.
        assert bubbles["1F1B"] == pytest.approx(3 / 19)
        held = {name: one["held"] for name, one in row["bubbles"].items()}
        assert held["1F1B"] == pytest.approx(4)
        assert held["tight"] <= row["stages"]
        assert held["level"] <= held["ZBV"] * 1.001
    (ragged,) = result["ragged"]
    assert 1 < ragged["over_busiest"] < 1.25
    assert ragged["peak_bytes"] < 0.9 * 141e9
    assert ragged["step_s"] < min(one for one in ragged["peers"].values() if one)


@full
def test_two_stages_on_each_device_are_planned_at_equal_memory(benchmark):
    (row,) = benchmark("peers/v_shape.py", "--quick")["rows"]
    assert all(row[name]["held_bytes"] <= row["cap_gib"] * 2**30 for name in ("plain", "whole", "half"))
    assert row["half"]["step_s"] < row["whole"]["step_s"] < row["plain"]["step_s"]
