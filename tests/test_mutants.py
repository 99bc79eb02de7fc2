"""Planted faults stand in the code as it is, and `make test` runs what must notice them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[1]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "mutants" / "table.py"))["MUTANTS"]


def test_every_fault_has_a_name_of_its_own_and_replaces_one_place() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert not {one.name: one.file for one in MUTANTS if (ROOT / one.file).read_text().count(one.old) != 1}


def test_the_page_counts_them() -> None:
    assert f"plants {len(MUTANTS)} faults" in (ROOT / "docs" / "proof.md").read_text()


def test_every_killer_runs_under_make_test(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected; those of `make check-cuda` aside."""
    config = request.config
    if config.option.keyword or "slow" in config.option.markexpr or config.getoption("part") != (0, 1):
        pytest.skip("only a part of the cases is selected")
    items = request.session.items
    files = {item.path for item in items}
    whole = config.args == config.getini("testpaths")
    silent = []
    for killer in {mutant.killer for mutant in MUTANTS if mutant.killer.verb == "pytest"}:
        places = [ROOT / word.partition("::")[0] for word in killer.words]
        collected = whole or all(any(file.is_relative_to(place) for file in files) for place in places)
        on_gpu = killer.words[0].startswith("tests/rehearsal/") and "not cuda" in config.option.markexpr
        if collected and not on_gpu and not any(selects(killer, item) for item in items):
            silent.append(str(killer))
    assert not silent, "they select nothing, or what `make test-all` alone runs"


def selects(killer: Any, item: pytest.Item) -> bool:
    if not any(_holds(word, item) for word in killer.words):
        return False
    if killer.m and not Expression.compile(killer.m).evaluate(lambda name, **_: any(item.iter_markers(name))):
        return False
    return not killer.k or Expression.compile(killer.k).evaluate(KeywordMatcher.from_item(item))


def _holds(word: str, item: pytest.Item) -> bool:
    file, _, name = word.partition("::")
    if not name:
        return item.path.is_relative_to(ROOT / file)
    return item.nodeid == word or item.nodeid.startswith((f"{word}[", f"{word}::"))
