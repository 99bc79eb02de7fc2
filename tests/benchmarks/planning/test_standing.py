"""The standing table: every planner's figures are computed again, and stand on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from evenload.benchmarks.planning import standing

ROWS: dict[str, Any] = json.loads(standing.FIGURES.read_text())


def test_every_planner_has_a_row_and_every_row_a_planner() -> None:
    assert set(ROWS) == set(standing.planners())


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_claims_comes_out_again(name: str) -> None:
    again = standing.row_of(standing.planners()[name])
    assert again["source"] == ROWS[name]["source"]
    for drawn, figures in again["sets"].items():
        assert figures == pytest.approx(ROWS[name]["sets"][drawn], abs=2e-4), drawn


def test_the_page_has_these_rows() -> None:
    text = standing.PAGE.read_text()
    assert standing.page_with(ROWS, text) == text
    assert all(f"| {name} |" in text for name in ROWS)


def test_a_planner_that_loses_a_sample_has_no_row() -> None:
    def plan(lengths: Any, num_ranks: int, cap: int) -> list[list[list[int]]]:
        return [[list(range(rank, len(lengths) - 1, num_ranks))] for rank in range(num_ranks)]

    with pytest.raises(ValueError, match="mine does not deal each sample"):
        standing.figure({"NAME": "mine", "plan": plan}, standing.SETS["instructions"])


def test_packs_over_the_cap_stand_below_those_that_keep_it() -> None:
    order = standing.ranked(ROWS)
    over = [any(one["over_cap"] for one in ROWS[name]["sets"].values()) for name in order]
    assert over == sorted(over)
