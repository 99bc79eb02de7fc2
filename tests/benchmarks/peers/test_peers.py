"""The tables beside other people's rules, each by a small run: rules are there, and rows are of one batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"


def run(name: str, folder: Path, *words: str) -> dict[str, Any]:
    lengths = np.random.default_rng(3).lognormal(6, 1.2, 2000).astype(int).clip(8, 60000)
    np.savetxt(folder / "drawn.txt", lengths, "%d")
    command = [sys.executable, "-P", str(SCRIPTS / f"{name}.py"), *words, "--json", "--out", "out.json"]
    done = subprocess.run([*command, "--lengths", "drawn.txt"], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result == json.loads((folder / "out.json").read_text())
    return result


@pytest.mark.slow
def test_packing(tmp_path: Path) -> None:
    result = run("packing", tmp_path, "--ranks", "8", "--samples", "256", "--cap", "4096", "--batches", "1")
    rows = {(row["lengths"], row["kind"], row["name"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * (5 + 2 + 3)
    for (_, kind, name), row in rows.items():
        assert row["busiest_over_mean"] >= 1 - 1e-9
        assert row["over_cap"] == 0 or name.startswith("verl")
        if name == "evenload" and kind != "groups":
            assert row["busiest_over_mean"] < 1.02
    # Who is not over the cap is not ahead.
    for behind in result["behind"]:
        assert all(rows[behind["lengths"], behind["kind"], name]["over_cap"] for name in behind["ahead"])


@pytest.mark.slow
def test_mesh(tmp_path: Path) -> None:
    result = run("mesh", tmp_path, "--ranks", "16", "--samples", "64", "--batches", "1")
    assert len(result["rows"]) == 2 * 2 * 4
    assert result["behind"] == []
    assert all(row["over_evenload"] >= 1 - 1e-9 for row in result["rows"])


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    result = run("experts", tmp_path, "--draws", "1")
    assert result["behind"] == []
    of_case = {row["name"]: row["ratio"] for row in result["rows"] if row["case"] == "zipf 0.9, 64 x 128"}
    assert of_case["evenload clone"] == pytest.approx(1.0, abs=1e-4)
    assert of_case["MoonEP"] <= of_case["UltraEP"] < of_case["EPLB"] < of_case["static"]


@pytest.mark.slow
def test_tenants(tmp_path: Path) -> None:
    result = run("tenants", tmp_path, "--tenants", "4", "--steps", "2")
    assert [row["samples"] for row in result["rows"]] == [4, 16] * 2
    for row in result["rows"]:
        assert 0 < row["groups"] <= 2
        assert row["lorafusion_s"] > row["step_s"] / 2
        assert row["never_drained_s"] > row["step_s"] / 2
