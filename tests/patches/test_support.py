"""The support table and the rows it is made of."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest
from evenload.integrations.host.versions import SUPPORTED
from evenload.patches import Patch, support
from evenload.patches.support import PASSED
from packaging.requirements import Requirement

COMMITTED = Path(__file__).parents[2] / "docs" / "support.md"
ROWS = support.all_rows()


@pytest.mark.every_plugin
def test_the_committed_table_is_in_step_with_the_rows():
    assert COMMITTED.read_text().endswith(support.document()), "make docs"


def test_every_row_is_in_the_table_under_its_own_name():
    text = " ".join(support.document().split())
    entry = r"- \*\*{}\*\* [^`]*(`\w+`[^`]*)?`{}`"
    assert all(re.search(entry.format(re.escape(row.name), re.escape(row.target)), text) for row in ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({row.target for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_which_versions_and_why(row: Patch):
    bounds = {specifier.operator for specifier in Requirement(row.supports).specifier}
    assert bounds == {">=", "<"}, "an open end would apply the row to versions nobody has tried"
    assert len(row.why) > 40
    assert "|" not in row.why
    assert "\n" not in row.why


def test_each_version_of_a_host_that_is_tested_has_the_day_on_which_it_last_passed():
    groups = tomllib.loads((COMMITTED.parents[1] / "pyproject.toml").read_text())["dependency-groups"]
    assert all(f"{row.host}=={row.version}" in groups[row.group] for row in PASSED)
    names = {*SUPPORTED, "trl", "peft"}
    rows = {(row.group, row.host) for row in PASSED}
    for group in ("tested", "newest", "older", "today", "trl114", "trl113"):
        assert {(group, name) for line in groups[group] if (name := line.split("==")[0]) in names} <= rows
    assert all(date.fromisoformat(row.day) for row in PASSED)
    makefile = (COMMITTED.parents[1] / "Makefile").read_text()
    assert all(f"\n{row.command}:" in makefile for row in PASSED)
