"""The benchmark of plans and their arrival, on few steps."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_step_is_its_wait_and_its_passes(ran, tmp_path):
    sizes = ("--layout", "1x4x1:32", "--max-length", "8192", "--steps", "3", "--local-ranks", "1", "2")
    assert "predicted" in ran("planning/arrival.py", *sizes, "--out", "arrival.json", folder=tmp_path).stdout
    (result,) = json.loads((tmp_path / "arrival.json").read_text())
    assert [run["local_ranks"] for run in result["runs"]] == [1, 2]
    for run in result["runs"]:
        assert len(run["rows"]) == 3
        for row in run["rows"]:
            assert row["step_s"] == row["wait_s"] + row["passes_s"]
            assert row["passes_s"] >= row["finished_s"] * (1 - 1e-3)
