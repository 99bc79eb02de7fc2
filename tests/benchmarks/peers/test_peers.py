"""Tables next to other people's rules and schedules, each by a small run: nobody is ahead by lawful means."""

from __future__ import annotations

import numpy as np
import pytest
from harness.cases import full


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """``run("packing", *words)``: a table of the same lengths for all."""
    path = tmp_path_factory.mktemp("peers") / "drawn.txt"
    np.savetxt(path, np.random.default_rng(3).lognormal(6, 1.2, 2000).astype(int).clip(8, 60000), "%d")
    return lambda name, *words: benchmark(f"peers/{name}.py", "--lengths", path, *words)


def test_packing(run):
    result = run("packing", "--ranks", "8", "--samples", "256", "--cap", "4096", "--batches", "1")
    rows = {(row["lengths"], row["kind"], row["name"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * (5 + 2 + 3)
    for (_, kind, name), row in rows.items():
        assert row["busiest_over_mean"] >= 1 - 1e-9
        assert row["over_cap"] == 0 or name.startswith("verl")
        if name == "evenload" and kind != "groups":
            assert row["busiest_over_mean"] < 1.02
    # Who is not over the cap is not ahead.
    for behind in result["behind"]:
        assert all(rows[behind["lengths"], behind["kind"], name]["over_cap"] for name in behind["ahead"])


def test_mesh(run):
    result = run("mesh", "--ranks", "16", "--samples", "64", "--batches", "1")
    assert len(result["rows"]) == 2 * 2 * 4
    assert result["behind"] == []
    assert all(row["over_evenload"] >= 1 - 1e-9 for row in result["rows"])


def test_experts(benchmark):
    result = benchmark("peers/experts.py", "--draws", "1")
    assert result["behind"] == []
    of_case = {row["name"]: row["ratio"] for row in result["rows"] if row["case"] == "zipf 0.9, 64 x 128"}
    assert of_case["evenload clone"] == pytest.approx(1.0, abs=1e-4)
    assert of_case["MoonEP"] <= of_case["UltraEP"] < of_case["EPLB"] < of_case["static"]


def test_tenants(run):
    result = run("tenants", "--tenants", "4", "--steps", "2")
    assert [row["samples"] for row in result["rows"]] == [4, 16] * 2
    for row in result["rows"]:
        assert 0 < row["groups"] <= 2
        assert min(row["lorafusion_s"], row["never_drained_s"]) > row["step_s"] / 2


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
