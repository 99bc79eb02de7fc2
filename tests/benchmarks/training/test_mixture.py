"""What the benchmark of mixtures measures of draws."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import evenload
import pytest

SCRIPT = Path(evenload.__file__).parent / "benchmarks" / "training" / "mixture.py"


def test_one_order_and_mixtures_of_many_have_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("benchmark_of_mixtures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "SAMPLES", 2000)
    rows = script.drawn()
    assert [row["domains"] for row in rows] == [0, *script.DOMAINS]
    assert all(row["us"] > 0 for row in rows)
    losses = {"step_s": {"with": 1.0, "without": 1.0}, "over": {"median": 1.0, "interval": None}}
    assert script.table({"draw": rows, "losses": losses}).row_count == len(rows)
