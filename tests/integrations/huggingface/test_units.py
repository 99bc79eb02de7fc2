"""Pairs and single answers: what TRL's Trainers train under plans of units is what they train without."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE = 1e-9


def test_pairs_change_ranks_and_gradients_stay(on_ranks):
    for found in on_ranks(2, "rank_units.errors", kinds=["dpo", "reward", "kto"]):
        for kind, one in found.items():
            print(kind, one)
            assert one["idle"] == [], (kind, one)
            assert one["planned"] == 1, (kind, one)
            assert one["grad"] < DOUBLE, (kind, one)
