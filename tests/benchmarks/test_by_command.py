"""Scripts whose commands other tests replace by forks, as users start them: minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import evenload
import pytest

BENCHMARKS = Path(evenload.__file__).parent / "benchmarks"
SWEPT = (BENCHMARKS.parent / "recipes" / "sweeps" / "importlib.yaml", "train.steps=16", "sweep.halve_every=8")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "words", "key"),
    [
        ("generation/collect.py", ("--quick",), "rows"),
        (
            "generation/decode.py",
            ("--trainers", "megatron", "--slots", "1", "--prompt", "8", "--tokens", "4", "--repeats", "1"),
            "rows",
        ),
        ("lora/sweep.py", SWEPT, "runs"),
        ("planning/mesh.py", ("--quick",), "batches"),
        ("training/mixtures.py", ("--quick",), "rows"),
        ("training/slow_ranks.py", ("--causes", "none", "--steps", "5"), "rows"),
    ],
)
def test_a_script_ends_well(script, words, key, tmp_path):
    command = [sys.executable, "-P", BENCHMARKS / script, *words, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)[key]
