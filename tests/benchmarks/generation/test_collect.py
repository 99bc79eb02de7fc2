"""The benchmark of samples that are kept, on two rules and a model that has learned nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "generation" / "collect.py"


@pytest.mark.slow
def test_a_row_for_each_rule_and_less_work_where_the_first_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), "--quick", "--json", "--folder", str(tmp_path / "c")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    whole, first = json.loads(done.stdout)["rows"]
    assert (whole["rule"], first["rule"]) == ("all of 2", "1 of 2")
    assert first["tokens"] <= whole["tokens"]
    assert first["kept_tokens"] <= whole["kept_tokens"]
    assert (whole["collected"], first["collected"]["kept"]) == (None, 3)
