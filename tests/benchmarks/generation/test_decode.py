"""The benchmark of decode steps, on few slots and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "generation" / "decode.py"


@pytest.mark.slow
def test_a_row_for_each_number_of_slots(tmp_path: Path) -> None:
    words = [
        "--trainers",
        "megatron",
        "--slots",
        "1",
        "3",
        "--prompt",
        "8",
        "--tokens",
        "4",
        "--repeats",
        "1",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["slots"], row["trainer"]) for row in rows] == [(1, "megatron"), (3, "megatron")]
    for row in rows:
        assert row["step"] > row["model"] > row["products"] > 0
        assert row["packing"] > 0
        assert row["by_packs"] > 0
    assert rows[0]["over_one_slot"] == 1.0
