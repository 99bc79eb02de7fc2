"""The benchmarks of hosts run, and their figures are possible: equal losses, less computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "hosts"


def result(script: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_of_missing_checkouts_say_so() -> None:
    rows = result("upstream.py")["rows"]
    assert {row["script"] for row in rows} >= {"transformers run_clm.py", "trl sft.py", "peft train.py"}
    assert all(row["missing"] == f"no {row['script'].split()[0]}/{row['path']}" for row in rows)


@pytest.mark.slow
def test_a_script_of_a_checkout_is_run_stock_and_with_evenload(tmp_path: Path) -> None:
    script = tmp_path / "trl" / "trl" / "scripts" / "sft.py"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "hosts" / "scripts" / "trl_sft_script.py", script)
    (row,) = result("upstream.py", tmp_path / "trl", "--only", "LoRA", "--layouts", "ddp")["rows"]
    assert row["codes"] == [0, 0]
    assert row["steps"] == 20
    assert row["difference"]["loss"] < 1e-5
    assert row["difference"]["grad_norm"] < 5e-5
    assert row["tokens"][1] < 0.8 * row["tokens"][0]
    assert row["said"][1] == "planned 20 steps of Transformers' Trainer with packing"


@pytest.mark.slow
def test_pairs_are_equal_and_less_is_computed() -> None:
    rows = result("pairs.py", "--quick", "--repeats", "1", "--variants", "padded,evenload")["rows"]
    padded, ours = rows
    assert ours["apart"]["loss"] < 1e-5
    assert ours["apart"]["grad_norm"] < 5e-5
    assert ours["same_steps"]
    assert ours["tokens"] == padded["tokens"] <= ours["computed"] < 0.8 * padded["computed"]
