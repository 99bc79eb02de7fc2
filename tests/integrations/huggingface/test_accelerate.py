"""Loops of Accelerate without a Trainer, as users write them, each in float64 against itself: planned batch by batch,
left as they are with a word, or refused before an update. They are in rank_accelerate.py."""

from __future__ import annotations

import pytest
from variant_checks import check_planned, check_refused, check_stays

pytestmark = pytest.mark.slow


def test_loops_that_are_planned_train_as_without_evenload(on_ranks):
    check_planned(on_ranks(2, "rank_accelerate.of_kind", kind="planned"), most_of_loss=1e-9)


def test_loops_that_cannot_be_planned_stay_as_they_are_and_say_why(on_ranks):
    check_stays(on_ranks(2, "rank_accelerate.of_kind", kind="stays"))


def test_a_loss_that_stops_being_the_models_is_refused_on_all_ranks_before_an_update(on_ranks):
    check_refused(on_ranks(2, "rank_accelerate.of_kind", kind="refused"), most_planned=1)


def test_packs_are_filled_up(on_ranks):
    for ended in on_ranks(2, "rank_accelerate.filled_up"):
        assert ended["grad"] < 1e-9, ended
        assert len(ended["planned"]) == 3, ended
        assert not any(tokens % 64 for tokens in ended["ran"]), ended


def test_batches_of_one_length_run_as_they_are(on_ranks):
    """Bit by bit the stock step, and it is reported as a plan."""
    for ended in on_ranks(2, "rank_accelerate.one_length"):
        assert (ended["refused"], ended["said"]) == ("", [])
        assert (ended["grad"], ended["loss"]) == (0.0, 0.0)
        assert len(ended["planned"]) == 1
