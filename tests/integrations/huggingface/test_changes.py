"""Trainers of scripts that change batches, steps and gradients on their way, each in float64 against itself: planned as
what comes to the model, left as they are with a word, or refused before an update."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PLANNED = {
    "labels of a step": 2,
    "ids in place": 2,
    "other batch": 2,
    "passed over": 2,
    "masked after counting": 2,
    "own divisor": 2,
    "prepared": 2,
    "one object twice": 2,
    "one object changed": 2,
    "twice in a step": 2,
    "counting": 2,
    "interrupted": 2,
    "names of samples": 2,
    "targetless step": 1,
    "masking hooks": 2,
    "means of batches": 2,
    "divisor of each rank": 2,
    "kept logits": 2,
    "kept logits of rows": 2,
    "older adapters": 2,
}
"""Scripts, and how many of their steps are packs."""
STOCK = {
    "own step": "does not call Trainer.training_step",
    "prompt tuning": "PromptTuningConfig",
    "means with a penalty": "a loss with another divisor than the number of targets of the whole batch",
    "raises anyhow": "LookupError: no loss",
    "smooth means": "the model's forward does not compute its loss by its loss function",
}
REFUSED = {
    "raises on short rows": "ValueError: rows of 13 tokens and more",
    "last passed over": "batches of a planned step did not come to Trainer.training_step",
    "divisor of each batch": "the batches of one step are not divided by one number",
    "changed behind": "batches are changed behind Trainer.training_step",
    "clamping hooks": "a hook on a parameter changes gradients, and not in proportion to them",
    "other keys on a rank": "a batch with return_dict",
    "halving hooks": "a hook on a parameter changes gradients, and not in proportion to them",
}


def test_what_a_script_makes_of_its_batches_is_what_is_planned(on_ranks):
    for of_rank in on_ranks(2, "rank_changes.variants", names=list(PLANNED)):
        for name, ended in of_rank.items():
            assert not ended["refused"], (name, ended)
            assert ended["grad"] < 1e-9, (name, ended)
            assert ended["loss"] < 1e-5, (name, ended)
            assert ended["planned"] == ["packs"] * PLANNED[name], (name, ended)
            assert not ended["said"], (name, ended)


def test_trainers_that_cannot_be_planned_stay_as_they_are_and_say_why(on_ranks):
    for of_rank in on_ranks(2, "rank_changes.variants", names=list(STOCK)):
        for name, ended in of_rank.items():
            assert not ended["refused"], (name, ended)
            assert not ended["planned"], (name, ended)
            assert ended["grad"] == ended["loss"] == 0, (name, ended)
            assert STOCK[name] in ended["said"][0], (name, ended)


def test_what_no_plan_can_follow_is_refused_on_all_ranks(on_ranks):
    own, other = on_ranks(2, "rank_changes.variants", names=list(REFUSED))
    for name, ended in own.items():
        assert REFUSED[name] in (ended["refused"] or ""), (name, ended)
        assert ended["refused"] == other[name]["refused"]
