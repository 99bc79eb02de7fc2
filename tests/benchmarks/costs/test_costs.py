"""Benchmarks of predictions and of refit, on results that no trainer has to make."""

from __future__ import annotations

import pytest
from evenload.api import load_recipe
from evenload.benchmarks.costs import predicted, refit


def test_there_are_enough_plans_of_both_trainers_and_their_recipes_are_valid():
    count = {"megatron": 0, "deepspeed": 0}
    for scenario in predicted.SCENARIOS:
        count[scenario.trainer] += 2 * len({*scenario.against.split(","), "evenload"})
        recipe, overrides = predicted.PROFILES[scenario.profile]
        load_recipe(predicted.RECIPES / recipe, [*predicted.SIZES, *overrides])
        chosen = load_recipe(predicted.RECIPES / recipe, [*predicted.SIZES, *scenario.overrides])
        assert chosen.trainer == scenario.trainer
        assert chosen.min_world_size == (4 if "4 ranks" in scenario.profile else 2)
    assert min(count.values()) >= 8
    assert sum(count.values()) >= 20


def test_errors_are_those_of_the_steps(tmp_path, monkeypatch):
    asked = []

    def run(verb, recipe, overrides, options):
        """Steps of the quickstart take a quarter longer than predicted, others as long."""
        asked.append((verb, [*overrides, *options]))
        if verb == "profile":
            return {key: {} for key in ("source", "passes", "update_s", "links", "fit_error")}
        factor, times = 1.25 if recipe == "quickstart.yaml" else 1.0, {"in_order": [1.0, 2.0], "evenload": [0.5, 0.8]}
        return {
            "predicted_s": times,
            "measured_s": {name: [factor * s for s in row] for name, row in times.items()},
            "busiest_error": {name: [0.01, -0.02] for name in times},
        }

    monkeypatch.setattr(predicted, "evenload", run)
    result = predicted.benchmark(predicted.SCENARIOS, steps=2, repeats=3)
    assert result["error"]["megatron"]["mean"] == pytest.approx(0.2)
    assert result["error"]["deepspeed"] == {"plans": 24, "mean": 0.0, "worst": 0.0}
    assert result["error"]["all"]["plans"] == len(result["rows"]) == 4 * len(predicted.SCENARIOS)
    # A profile for each set-up, and every bench with the costs that were just written.
    assert [verb for verb, _ in asked].count("profile") == len(predicted.PROFILES)
    for (verb, words), (_, before) in zip(asked[1:], asked, strict=False):
        if verb == "bench":
            (costs,) = (word.removeprefix("costs=") for word in words if word.startswith("costs="))
            assert costs in before or f"costs={costs}" in before
    predicted.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert predicted.table(result).row_count == 4 * len(predicted.SCENARIOS)


def test_three_runs_are_averaged_after_learning_and_shown(monkeypatch, shown):
    asked = []

    def train(recipe, overrides):
        asked.append(overrides[-1])
        learned = 1.25 if "planner.refit=true" in overrides else 1.5
        numbers = {"step_s": 2.0, "plan_wait_s": 1.0, "predicted_s": 0.5}
        steps = [{"imbalance": 1.5 if k < 5 else learned, **numbers} for k in range(10)]
        return {"steps": steps, "refit": None, "host": {"trainer": "megatron", "device": "cpu"}}

    monkeypatch.setattr(refit, "train", train)
    result = refit.benchmark("r.yaml", ["train.steps=10"], "wrong", "right")
    assert [run["imbalance_mean"] for run in result["runs"].values()] == [1.5, 1.25, 1.5]
    assert result["runs"]["wrong, refit"]["predicted_over_measured"] == [0.5] * 10
    assert asked == ["costs=wrong", "planner.refit=true", "costs=right"]
    text = shown(refit.table(result))
    assert "wrong, refit" in text
    assert "1.25" in text
