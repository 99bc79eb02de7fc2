"""Scripts as users start them, whose commands other tests replace by forks (minutes), and lengths of a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import evenload
import pytest
from harness.cases import full

BENCHMARKS = Path(evenload.__file__).parent / "benchmarks"
ONE_STEP = ("--trainers", "megatron", "--slots", "1", "--prompt", "8", "--tokens", "4", "--repeats", "1")
FEW_DRAFTS = ("--steps", "6", "--every", "1", "--on", "5", "--prompts", "2", "--samples", "2", "--tokens", "8")
SWEPT = (BENCHMARKS.parent / "recipes" / "sweeps" / "importlib.yaml", "train.steps=16", "sweep.halve_every=8")


@full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "key"),
    [
        ("generation/collect.py", ("--quick",), "rows"),
        ("generation/decode.py", ONE_STEP, "rows"),
        ("generation/drafts.py", (*FEW_DRAFTS, "--ranks", "1"), "rows"),
        ("lora/sweep.py", SWEPT, "runs"),
        ("planning/mesh.py", ("--quick",), "batches"),
        ("training/mixtures.py", ("--quick",), "rows"),
    ],
)
def test_a_script_ends_well(script, words, key, tmp_path):
    command = [sys.executable, "-P", BENCHMARKS / script, *words, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)[key]


def test_samples_are_as_long_as_the_file_says(ran, tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n900\n1\n17\n2\n33\n")
    ran("long_tail.py", "--lengths", "lengths.txt", "--out", "x.jsonl", "--longest", 100, "--count", 3, folder=tmp_path)
    rows = [json.loads(line)["text"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [len(text.encode()) for text in rows] == [5, 17, 2]
