"""Planted faults stand in the code as it is: a fault whose place has changed would end the run that plants it."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = runpy.run_path(str(ROOT / "tests" / "mutants" / "table.py"))


def test_every_fault_replaces_one_place_and_has_a_killer() -> None:
    odd = {
        mutant.name: mutant.file
        for mutant in TABLE["MUTANTS"]
        if (ROOT / mutant.file).read_text().count(mutant.old) != 1 or mutant.killer not in TABLE["KILLERS"]
    }
    assert not odd
