"""The tables beside other people's rules, each by a small run: rules are there, and rows are of one batch."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """``run("packing", *words)``: a table of the same lengths for all."""
    path = tmp_path_factory.mktemp("peers") / "drawn.txt"
    np.savetxt(path, np.random.default_rng(3).lognormal(6, 1.2, 2000).astype(int).clip(8, 60000), "%d")
    return lambda name, *words: benchmark(f"peers/{name}.py", "--lengths", path, *words)


def test_packing(run):
    result = run("packing", "--ranks", "8", "--samples", "256", "--cap", "4096", "--batches", "1")
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


def test_mesh(run):
    result = run("mesh", "--ranks", "16", "--samples", "64", "--batches", "1")
    assert len(result["rows"]) == 2 * 2 * 4
    assert result["behind"] == []
    assert all(row["over_evenload"] >= 1 - 1e-9 for row in result["rows"])


def test_experts(benchmark):
    result = benchmark("peers/experts.py", "--draws", "1")
    assert result["behind"] == []
    of_case = {row["name"]: row["ratio"] for row in result["rows"] if row["case"] == "zipf 0.9, 64 x 128"}
    assert of_case["evenload clone"] == pytest.approx(1.0, abs=1e-4)
    assert of_case["MoonEP"] <= of_case["UltraEP"] < of_case["EPLB"] < of_case["static"]


def test_tenants(run):
    result = run("tenants", "--tenants", "4", "--steps", "2")
    assert [row["samples"] for row in result["rows"]] == [4, 16] * 2
    for row in result["rows"]:
        assert 0 < row["groups"] <= 2
        assert row["lorafusion_s"] > row["step_s"] / 2
        assert row["never_drained_s"] > row["step_s"] / 2
