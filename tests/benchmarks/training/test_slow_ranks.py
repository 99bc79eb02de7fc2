"""A real run of two ranks, of which one reads slowly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import evenload
import pytest

SCRIPT = Path(evenload.__file__).parent / "benchmarks" / "training" / "slow_ranks.py"


@pytest.mark.slow
def test_a_rank_that_reads_slowly_is_named_by_the_run() -> None:
    words = [sys.executable, str(SCRIPT), "--causes", "data", "--steps", "21", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert ("data", 1) in [(one["cause"], one["rank"]) for one in row["stragglers"]]
    assert "rank 1 is slow in data" in done.stderr
