"""Pipelines beside schedules of torch in quick mode: at the device's memory none of these is ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "planning" / "pipeline_peers.py"


@pytest.mark.slow
def test_no_schedule_of_torch_is_ahead_at_the_memory_of_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), "--quick", "--json", "--out", "peers.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "peers.json").read_text())
    assert len(result["uniform"]) == 2
    for row in result["uniform"]:
        bubbles = row["bubbles"]
        assert min(bubbles, key=lambda name: bubbles[name]["bubble"]) in ("evenload", "whole")
        assert bubbles["evenload"]["bubble"] <= bubbles["ZBVZeroBubble"]["bubble"]
        assert bubbles["tight"]["held"] <= row["stages"]
    (ragged,) = result["ragged"]
    assert 1 < ragged["over_busiest"] < 1.25
    assert ragged["peak_bytes"] < 0.9 * 141e9
