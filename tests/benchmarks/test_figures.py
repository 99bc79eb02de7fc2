"""`make figures` has the rows of README's evidence, and shows each run with its interval."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import evenload
import pytest
from evenload.benchmarks import figures

ROOT = Path(evenload.__file__).parent
PAIRS = [
    {"variant": "evenload", "over_padded": 3.9, "ratios": [3.5, 4.2]},
    {"variant": "bfd", "over_padded": 3.0, "ratios": [2.5, 3.1]},
]
TREES = [
    {"variant": "trees", "over_padded": 2.8, "ratios": [2.6, 2.9]},
    {"variant": "rows", "over_padded": 1.6, "ratios": [1.5, 1.7]},
]
RESULTS = {
    "benchmarks/hosts/trees.py": {"rows": TREES},
    "benchmarks/hosts/pairs.py": {"rows": PAIRS},
    "benchmarks/hosts/programs.py": {"rows": [{"program": "llamafactory", "faster": 1.42, "ratios": [1.4, 1.44]}]},
    "evenload bench": {"ratio": {"stock": {"of_totals": 2.43, "interval": [2.2, 2.6]}}},
    "evenload verify": {"grad_rel_err": 1.1e-15},
    "benchmarks/costs/predicted.py": {"error": {"all": {"mean": 0.071, "worst": 0.24}}},
}


def test_the_rows_are_the_commands_of_the_readme() -> None:
    evidence = (ROOT / "README.md").read_text().partition("## Evidence")[2].partition("\n## ")[0]
    commands = re.findall(r"`((?:\S*\.py|python|evenload)[^`]*)`", evidence)
    ours = [row.command for row in figures.EVIDENCE.values()]
    assert len(commands) == len(ours)
    assert not [one for one in ours if not any(one.endswith(said) for said in commands)]


def test_the_page_has_every_figure_of_every_run_with_its_interval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: Any
) -> None:
    def printed(command: str) -> Any:
        return next(result for words, result in RESULTS.items() if words in command)

    monkeypatch.setattr(figures, "printed", printed)
    asked = argparse.Namespace(rows=["all"], runs=2, out=tmp_path / "figures.json")
    result = figures.benchmark(asked)
    assert {row["row"] for row in result["rows"]} == set(figures.EVIDENCE)
    page = (tmp_path / "figures.md").read_text()
    assert "| run 1 | run 2 | minutes a run |" in page
    assert "over padding | 3.900 (3.50 to 4.20) | 3.900 (3.50 to 4.20) |" in page
    assert "over bfd | 1.300 | 1.300 |" in page
    assert "over no trees | 1.750 | 1.750 |" in page
    assert "1.1e-15" in page
    assert "2.430 (2.20 to 2.60)" in shown(figures.table(result))


def test_without_rows_the_commands_are_listed_and_none_runs(monkeypatch: pytest.MonkeyPatch, shown: Any) -> None:
    monkeypatch.delattr(figures, "printed")
    text = shown(figures.table(figures.benchmark(argparse.Namespace(rows=[], runs=2, out=None))))
    assert all(row.command in text for row in figures.EVIDENCE.values())


def test_bad_input_a_row_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no rows pears"):
        figures.benchmark(argparse.Namespace(rows=["pears"], runs=1, out=None))
