"""`benchmarks/faults/checkpoints.py` at a small size: both questions are answered, and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "faults" / "checkpoints.py"
RECIPE = SCRIPT.parents[2] / "recipes" / "quickstart.yaml"
SIZES = ("model.num_layers=1", "model.hidden_size=64", "data.max_length=256", "train.global_batch_size=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ((), {"step", "save with hashes", "save without", "compare hashes"}),
        (("--background",), {"step", "save, foreground", "save, background"}),
    ],
)
def test_every_row_is_a_time(options: tuple[str, ...], rows: set[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = [str(SCRIPT), str(RECIPE), *SIZES, *options, "--repeats", "1", "--json", str(out)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["seconds"].keys() == rows
    assert all(len(times) == 1 or name == "step" for name, times in result["all"].items())
    assert 0 < min(result["seconds"].values()) <= max(result["seconds"].values()) < 60
    assert 0.5 < result["mib"] < 5
    assert not list(tmp_path.glob("checkpoints-*"))
