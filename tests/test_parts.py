"""What CI leaves out of one change it runs at the next ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(CONFTEST))


class Item:
    """A test, in the full run alone or not."""

    def __init__(self, full: bool) -> None:
        self.full = full

    def get_closest_marker(self, name: str) -> bool:
        return self.full and name == "full"


def left_of(conftest: Any, text: str, items: list[Item]) -> list[Item]:
    deselected: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    left = list(items)
    conftest._deselect_other_parts(SimpleNamespace(getoption=lambda _: conftest._part(text), hook=hook), left)
    assert sorted(map(id, left + deselected)) == sorted(map(id, items))
    return left


def test_as_many_changes_run_every_full_test_once_and_the_others_each_time(conftest: Any) -> None:
    items = [Item(full) for full in (True, False, True, True, True, True, False, True)]
    parts = [left_of(conftest, f"{number}/3", items) for number in (2019, 2020, 2021)]
    for item in items:
        assert sum(item in part for part in parts) == (1 if item.full else 3)
    assert [sum(item.full for item in part) for part in parts] == [2, 2, 2]


def test_without_a_part_all_are_run(conftest: Any) -> None:
    items = [Item(True), Item(False)]
    assert left_of(conftest, "1/1", items) == items
