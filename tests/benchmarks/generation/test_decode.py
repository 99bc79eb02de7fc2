"""The benchmark of decode steps, on few slots and tokens."""

from __future__ import annotations

import json

import pytest

WORDS = ("--trainers", "megatron", "--slots", "1", "3", "--prompt", "8", "--tokens", "4", "--repeats", "1", "--json")


@pytest.mark.slow
def test_a_row_for_each_number_of_slots(ran):
    rows = json.loads(ran("generation/decode.py", *WORDS).stdout)["rows"]
    assert [(row["slots"], row["trainer"]) for row in rows] == [(1, "megatron"), (3, "megatron")]
    for row in rows:
        assert row["step"] > row["model"] > row["products"] > 0
        assert row["packing"] > 0
        assert row["by_packs"] > 0
    assert rows[0]["over_one_slot"] == 1.0
