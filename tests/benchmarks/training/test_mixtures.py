"""What the benchmark of policies says of losses by seed, and a short run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from evenload.benchmarks.training import mixtures
from harness.cases import full


def rows(**policies: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Losses of two domains by seed."""
    return [
        {"policy": name, "seed": seed, "losses": {"a": a, "b": b}}
        for name, seeds in policies.items()
        for seed, (a, b) in enumerate(seeds)
    ]


def test_a_gain_within_the_spread_of_seeds_or_of_some_seeds_alone_is_none() -> None:
    default = [(2.0, 3.0), (2.1, 3.1), (1.9, 2.9)]
    within = [(a - 0.05, b - 0.3) for a, b in default]
    unsteady = [(2.6, 2.0), (2.7, 2.1), (1.7, 3.0)]
    rows_of = mixtures.summary(rows(default=default, within=within, unsteady=unsteady))
    assert {row["policy"] for row in rows_of} == {"default", "within", "unsteady"}
    by = {row["policy"]: row for row in rows_of}
    assert by["within"]["difference"]["a"] == pytest.approx(-0.05)
    assert by["within"]["verdict"] == {"a": "none", "b": "better", "mean": "better", "worst": "better"}
    assert by["unsteady"]["verdict"]["a"] == "none"
    assert by["unsteady"]["verdict"]["b"] == "none"
    assert set(by["default"]["verdict"].values()) == {"none"}
    assert by["default"]["spread"]["a"] == pytest.approx(0.1)


@full
@pytest.mark.slow
def test_a_short_run_has_every_domain_and_equal_tokens(forged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own command in a fork."""

    def trained(folder: Path, recipe: dict[str, Any]) -> Any:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = forged(folder, "train", "recipe.yaml", "--json")
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    monkeypatch.setattr(mixtures, "trained", trained)
    monkeypatch.setattr(mixtures, "MOST_HELD_OUT", 4)
    result = mixtures.benchmark(seeds=1, steps=4, names=["odm"])
    assert [row["policy"] for row in result["rows"]] == ["default", "odm"]
    assert {row["tokens"] for row in result["rows"]} == {4 * 16 * 256}
    for row in result["rows"]:
        assert set(row["losses"]) == set(result["samples"])
        assert all(0 < loss < 8 for loss in row["losses"].values())
        assert sum(row["drawn"].values()) == pytest.approx(1.0)
