"""The benchmark of refit, on results that no trainer has to make."""

from __future__ import annotations

from typing import Any

import pytest
from evenload.benchmarks.costs import refit
from evenload.commands.tables.show import emit


def test_three_runs_are_averaged_after_learning_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def train(recipe: str, overrides: list[str]) -> dict[str, Any]:
        asked.append(overrides)
        refits = "planner.refit=true" in overrides
        steps = [
            {"imbalance": 1.5 if k < 5 or not refits else 1.25, "step_s": 2.0, "plan_wait_s": 1.0, "predicted_s": 0.5}
            for k in range(10)
        ]
        return {"steps": steps, "refit": None, "host": {"trainer": "megatron", "device": "cpu"}}

    monkeypatch.setattr(refit, "train", train)
    result = refit.benchmark("r.yaml", ["train.steps=10"], "wrong", "right")
    assert [run["imbalance_mean"] for run in result["runs"].values()] == [1.5, 1.25, 1.5]
    assert result["runs"]["wrong, refit"]["predicted_over_measured"] == [0.5] * 10
    assert [a[-1] for a in asked] == ["costs=wrong", "planner.refit=true", "costs=right"]
    emit(result, False, refit.table)
    shown = capsys.readouterr().out
    assert "wrong, refit" in shown
    assert "1.25" in shown
