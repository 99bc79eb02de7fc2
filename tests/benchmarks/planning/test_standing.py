"""The standing table: every planner's figures are computed again, and stand on the page."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import evenload
import pytest

ROOT = Path(evenload.__file__).parent
STANDING = runpy.run_path(str(ROOT / "benchmarks" / "planning" / "standing.py"))
ROWS: dict[str, Any] = json.loads(STANDING["FIGURES"].read_text())


def test_every_planner_has_a_row_and_every_row_a_planner() -> None:
    assert set(ROWS) == set(STANDING["planners"]())


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_claims_comes_out_again(name: str) -> None:
    again = STANDING["row_of"](STANDING["planners"]()[name])
    assert again["source"] == ROWS[name]["source"]
    for drawn, figures in again["sets"].items():
        assert figures == pytest.approx(ROWS[name]["sets"][drawn], abs=2e-4), drawn


def test_the_page_has_these_rows() -> None:
    text = STANDING["PAGE"].read_text()
    assert STANDING["page_with"](ROWS, text) == text
    assert all(f"| {name} |" in text for name in ROWS)


def test_a_planner_that_loses_a_sample_has_no_row() -> None:
    def plan(lengths: Any, num_ranks: int, cap: int) -> list[list[list[int]]]:
        return [[list(range(rank, len(lengths) - 1, num_ranks))] for rank in range(num_ranks)]

    with pytest.raises(ValueError, match="mine does not deal each sample"):
        STANDING["figure"]({"NAME": "mine", "plan": plan}, STANDING["SETS"]["instructions"])


def test_packs_over_the_cap_stand_below_those_that_keep_it() -> None:
    order = STANDING["ranked"](ROWS)
    over = [any(one["over_cap"] for one in ROWS[name]["sets"].values()) for name in order]
    assert over == sorted(over)
