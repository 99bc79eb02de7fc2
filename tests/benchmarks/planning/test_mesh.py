"""The mesh benchmark in quick mode: every way is there, and none is below its bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "planning" / "mesh.py"


@pytest.mark.slow
def test_every_way_is_above_its_bound_and_mixing_degrees_pays(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), "--quick", "--json", "--out", "mesh.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "mesh.json").read_text())
    assert result["predicted"] is True
    (row,) = result["batches"]
    assert row["SP64"] >= row["BatchAda"] >= row["each"] > row["bound"]
    assert row["each"] * (1 + 1e-9) >= row["groups"] >= row["groups_bound"]
    assert row["SP64"] / 1.5 > row["evenload"] >= row["bound"] * (1 - 1e-9)
    assert row["imbalance"] <= 1.15
    (row,) = result["megatron"]
    assert row["our_imbalance"] <= 1.15 < row["their_imbalance"]
    assert row["launches"] > 1
    assert [r["over_bound"] >= 1 - 1e-9 for r in result["large"]] == [True, True]
