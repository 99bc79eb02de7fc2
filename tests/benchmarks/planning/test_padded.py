"""The benchmark of even padded groups in quick mode: its own search of all cuts agrees with the planner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "planning" / "padded.py"


@pytest.mark.slow
def test_plans_are_over_their_bounds_and_near_the_best(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), "--quick", "--json", "--out", "padded.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "padded.json").read_text())
    small, large = result["rows"]
    assert 1.0 - 1e-9 <= small["best"][0] <= small["best"][1] < 1.05
    for row in (small, large):
        assert row["bound"][0] >= 1.0 - 1e-9
        assert all(row[name][0] >= 1.0 - 1e-9 for name in ("group_by_length", "token_budget", "stock"))
