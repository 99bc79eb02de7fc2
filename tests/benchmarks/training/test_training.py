"""Benchmarks of training: what they make of their rows, and small runs."""

from __future__ import annotations

import json

import pytest
import yaml
from evenload.benchmarks.training import garbage, mixture, mixtures
from harness.cases import full


def test_one_draw_has_the_mean_and_many_have_the_longest():
    assert garbage.longest_s([1.0, 2.0, 6.0], 1) == pytest.approx(3.0)
    assert garbage.longest_s([1.0, 2.0, 6.0], 10_000) == pytest.approx(6.0)
    assert garbage.longest_s([0.0, 1.0], 2) == pytest.approx(0.75)


def test_many_ranks_pause_one_by_one_in_each_step_and_at_once_in_some():
    rows = [
        {"mode": mode, "step": step, "seconds": 0.1 + s, "most_pause_s": s, "pause_s": s, "left": 0.0}
        for mode in ("python", "every 4")
        for step, s in enumerate([0.0, 0.0, 0.0, 0.008], start=1)
    ]
    modes = garbage.summary(rows, num_ranks=2)
    assert modes["python"]["at_1024_s"] == pytest.approx(0.008)
    assert modes["every 4"]["at_1024_s"] == pytest.approx(0.002)
    assert modes["python"]["most_s"] == pytest.approx(0.108)


def test_packs_and_single_passes_give_the_same_rows(benchmark):
    few = ("--hidden", "16", "--layers", "1", "--samples", "3", "--batches", "1", "--columns", "64")
    result = benchmark("training/gradient_scores.py", *few)
    assert set(result["lengths"]) == {"16 to 128", "128 to 1,024"}
    for row in result["lengths"].values():
        assert max(row["off"], row["losses_off"]) < 1e-4
        assert min(row["scoring"], row["gradients"], row["projected"]) > 0


@pytest.mark.slow
def test_one_order_and_mixtures_of_many_have_a_row_each(monkeypatch):
    monkeypatch.setattr(mixture, "SAMPLES", 2000)
    rows = mixture.drawn()
    assert [row["domains"] for row in rows] == [0, *mixture.DOMAINS]
    assert all(row["us"] > 0 for row in rows)
    losses = {"step_s": {"with": 1.0, "without": 1.0}, "over": {"of_totals": 1.0, "interval": None}}
    assert mixture.table({"draw": rows, "losses": losses}).row_count == len(rows)


def test_a_gain_within_the_spread_of_seeds_or_of_some_seeds_alone_is_none():
    default = [(2.0, 3.0), (2.1, 3.1), (1.9, 2.9)]
    within = [(a - 0.05, b - 0.3) for a, b in default]
    policies = {"default": default, "within": within, "unsteady": [(2.6, 2.0), (2.7, 2.1), (1.7, 3.0)]}
    rows = [
        {"policy": name, "seed": seed, "losses": {"a": a, "b": b}}
        for name, seeds in policies.items()
        for seed, (a, b) in enumerate(seeds)
    ]
    by = {row["policy"]: row for row in mixtures.summary(rows)}
    assert by.keys() == policies.keys()
    assert by["within"]["difference"]["a"] == pytest.approx(-0.05)
    assert by["within"]["verdict"] == {"a": "none", "b": "better", "mean": "better", "worst": "better"}
    assert by["unsteady"]["verdict"]["a"] == by["unsteady"]["verdict"]["b"] == "none"
    assert set(by["default"]["verdict"].values()) == {"none"}
    assert by["default"]["spread"]["a"] == pytest.approx(0.1)


@full
def test_a_short_run_of_policies_has_every_domain_and_equal_tokens(forged, monkeypatch):
    def trained(folder, recipe):
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = forged(folder, "train", "recipe.yaml", "--json")
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    monkeypatch.setattr(mixtures, "trained", trained)
    monkeypatch.setattr(mixtures, "MOST_HELD_OUT", 4)
    result = mixtures.benchmark(seeds=1, steps=4, names=["odm"])
    assert [row["policy"] for row in result["rows"]] == ["default", "odm"]
    for row in result["rows"]:
        assert row["tokens"] == 4 * 16 * 256
        assert set(row["losses"]) == set(result["samples"])
        assert all(0 < loss < 8 for loss in row["losses"].values())
        assert sum(row["drawn"].values()) == pytest.approx(1.0)
