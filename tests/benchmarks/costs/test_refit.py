"""The benchmark of refit, on results that no trainer has to make."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from evenload.commands.tables.show import emit

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "costs" / "refit.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("refit_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["refit_benchmark"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_three_runs_are_averaged_after_learning_and_shown(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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

    monkeypatch.setattr(script, "train", train)
    result = script.benchmark("r.yaml", ["train.steps=10"], "wrong", "right")
    assert [run["imbalance_mean"] for run in result["runs"].values()] == [1.5, 1.25, 1.5]
    assert result["runs"]["wrong, refit"]["predicted_over_measured"] == [0.5] * 10
    assert [a[-1] for a in asked] == ["costs=wrong", "planner.refit=true", "costs=right"]
    emit(result, False, script.table)
    shown = capsys.readouterr().out
    assert "wrong, refit" in shown
    assert "1.25" in shown
