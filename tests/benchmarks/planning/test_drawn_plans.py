"""Drawn settings in which a plan was once slower than a lawful row of its own table, planned as the benchmark does."""

from __future__ import annotations

import json

import pytest

NEXT_TO_BOUND_WITH_COMMUNICATION = 969
CHOSEN_FOR_ITS_MEMORY = 1654


@pytest.mark.slow
@pytest.mark.parametrize("number", [NEXT_TO_BOUND_WITH_COMMUNICATION, CHOSEN_FOR_ITS_MEMORY])
def test_no_plan_is_slower_than_a_lawful_row(ran, number):
    result = json.loads(ran("planning/drawn_plans.py", "--settings", 1, "--first", number, "--json").stdout)
    assert result["planned"] == 1
    assert result["lawful_rows"] >= 2
    assert result["slower"] == []
