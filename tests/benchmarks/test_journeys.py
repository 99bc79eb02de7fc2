"""The pages have all that a newcomer must read for a journey, and a short one is travelled."""

from __future__ import annotations

from pathlib import Path

import evenload
import pytest
from evenload.benchmarks import journeys
from harness.cases import full

ROOT = Path(evenload.__file__).parent


@pytest.mark.parametrize("name", list(journeys.JOURNEYS))
def test_a_newcomer_reads_few_pages(name: str) -> None:
    pages = journeys.pages_of(ROOT, journeys.JOURNEYS[name].words)
    assert 1 <= len(pages) <= 3, pages


def test_words_that_no_page_has_are_noticed() -> None:
    assert journeys.pages_of(ROOT, ("plugins.of_nobody.at_all=",)) == []


@full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "planner", "off", "memory"])
def test_a_journey_comes_to_its_end(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "evenload").symlink_to(ROOT)  # the checkout's folder may have any name
    row = journeys.travelled(name, tmp_path, tmp_path / "model")
    assert row["came_out"], row["stopped"]
