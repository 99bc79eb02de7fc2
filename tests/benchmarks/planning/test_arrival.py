"""The benchmark of plans and their arrival, on few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "planning" / "arrival.py"


def test_a_step_is_its_wait_and_its_passes(tmp_path: Path) -> None:
    sizes = ["--layout", "1x4x1:32", "--max-length", "8192", "--steps", "3", "--local-ranks", "1", "2"]
    command = [sys.executable, "-P", str(SCRIPT), *sizes, "--out", "arrival.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    (result,) = json.loads((tmp_path / "arrival.json").read_text())
    assert [run["local_ranks"] for run in result["runs"]] == [1, 2]
    for run in result["runs"]:
        assert len(run["rows"]) == 3
        for row in run["rows"]:
            assert row["step_s"] == row["wait_s"] + row["passes_s"]
            assert row["passes_s"] >= row["finished_s"] * (1 - 1e-3)
