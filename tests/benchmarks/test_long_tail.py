"""Samples of given lengths have those lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "long_tail.py"


def test_samples_are_as_long_as_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n900\n1\n17\n2\n33\n")
    words = ["--lengths", tmp_path / "lengths.txt", "--out", tmp_path / "x.jsonl", "--longest", "100", "--count", "3"]
    done = subprocess.run([sys.executable, "-P", SCRIPT, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line)["text"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [len(text.encode()) for text in rows] == [5, 17, 2]
