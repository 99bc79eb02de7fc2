"""Trainers of scripts that change batches, steps and gradients on their way, each in float64 against itself: planned as
what comes to the model, left as they are with a word, or refused before an update. They are in rank_changes.py."""

from __future__ import annotations

import pytest
from variant_checks import check_planned, check_refused, check_stays

pytestmark = pytest.mark.slow


def test_what_a_script_makes_of_its_batches_is_what_is_planned(on_ranks):
    check_planned(on_ranks(2, "rank_changes.of_kind", kind="planned"), most_of_loss=1e-5)  # a Trainer logs four digits


def test_trainers_that_cannot_be_planned_stay_as_they_are_and_say_why(on_ranks):
    check_stays(on_ranks(2, "rank_changes.of_kind", kind="stays"))


def test_what_no_plan_can_follow_is_refused_on_all_ranks(on_ranks):
    check_refused(on_ranks(2, "rank_changes.of_kind", kind="refused"), most_planned=2)


def test_a_model_that_a_script_changes_later_is_measured_anew(on_ranks):
    for ended in on_ranks(2, "rank_changes.hooked_later"):
        assert ended["planned"] == ["packs"]
        assert ended["grad"] < 1e-9
        assert "padded groups: a sample has other results" in ended["said"][0]
