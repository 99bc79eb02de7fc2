"""The benchmark of whole rollouts, on few tokens of a model that is not trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "generation" / "throughput.py"


@pytest.mark.slow
@pytest.mark.full
def test_every_variant_makes_the_samples_that_are_asked_for(tmp_path: Path) -> None:
    words = ["--quick", "--trainers", "deepspeed", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert [row["variant"] for row in rows] == ["groups", "spread", "deepspeed", "padded", "continuous"]
    for row in rows:
        assert row["samples"] == 4 * 2
        assert row["samples"] <= row["tokens"] <= row["samples"] * 12
        assert row["longest"] <= 12
        assert row["rate"] > 0
    groups, spread = rows[:2]
    assert groups["tokens"] == spread["tokens"]
