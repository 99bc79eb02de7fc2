"""The benchmark of gradients of samples, on few samples of a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import evenload
import pytest

SCRIPT = Path(evenload.__file__).parent / "benchmarks" / "training" / "gradient_scores.py"
FEW = ("--hidden", "16", "--layers", "1", "--samples", "3", "--batches", "1", "--columns", "64")


@pytest.mark.slow
def test_packs_and_single_passes_give_the_same_rows(tmp_path: Path) -> None:
    words = [sys.executable, "-P", str(SCRIPT), *FEW, "--json", "--out", "told.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "told.json").read_text())
    assert set(told["lengths"]) == {"16 to 128", "128 to 1,024"}
    for row in told["lengths"].values():
        assert row["off"] < 1e-4
        assert row["losses_off"] < 1e-4
        assert row["scoring"] > 0
        assert row["gradients"] > 0
        assert row["projected"] > 0
