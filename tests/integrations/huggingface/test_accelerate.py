"""Loops of Accelerate without a Trainer, as users write them, each in float64 against itself: planned batch by batch,
left as they are with a word, or refused before an update."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PLANNED = {
    "plain": 4,
    "evaluating": 4,
    "resumed": 3,
    "unprepared loader": 4,
    "two losses, clipped": 4,
    "by hand": 4,
    "by tokens": 4,
    "closure": 4,
    "names of samples": 4,
    "by keywords": 4,
    "without mask": 4,
    "other labels": 4,
    "written ids": 4,
    "moved, autocast": 4,
    "by rows": 4,
    "with figures": 4,
    "masking hooks": 4,
    "older adapters": 4,
    "windows": 4,
}
"""Loops, and how many of their batches are planned."""
STOCK = {
    "not training": "its model is not in training mode",
    "on logits": "a batch without labels",
    "labels are inputs": "the labels of this batch count padding as targets",
    "prompt tuning": "PromptTuningConfig",
    "own attention": "train by transformers.Trainer, where padded rows are regrouped too",
}
REFUSED = {
    "own tokens": "the ranks multiply the model's loss by different numbers",
    "squared": "is not the model's own, nor a multiple of it",
    "with a penalty": "is not the model's own, nor a multiple of it",
    "with logits": "a planned forward gives its loss alone",
    "without accelerator.backward": "came to another backward than the Accelerator's",
    "clamping hooks": "a hook on a parameter changes gradients, and not in proportion to them",
}


def test_loops_that_are_planned_train_as_without_evenload(on_ranks):
    for of_rank in on_ranks(2, "rank_accelerate.variants", names=list(PLANNED)):
        for name, ended in of_rank.items():
            assert not ended["refused"], (name, ended)
            assert ended["grad"] < 1e-9, (name, ended)
            assert ended["loss"] < 1e-9, (name, ended)
            assert len(ended["planned"]) == PLANNED[name], (name, ended)
            assert not ended["said"], (name, ended)


def test_packs_are_filled_up(on_ranks):
    for ended in on_ranks(2, "rank_accelerate.filled_up"):
        assert ended["grad"] < 1e-9, ended
        assert len(ended["planned"]) == 4, ended
        assert not any(tokens % 64 for tokens in ended["ran"]), ended


def test_batches_of_one_length_run_as_they_are(on_ranks):
    """Bit by bit the stock step, and it is reported as a plan."""
    for of_rank in on_ranks(2, "rank_accelerate.variants", names=["one length"]):
        ended = of_rank["one length"]
        assert (ended["refused"], ended["said"]) == (None, [])
        assert (ended["grad"], ended["loss"]) == (0.0, 0.0)
        assert len(ended["planned"]) == 2


def test_loops_that_cannot_be_planned_stay_as_they_are_and_say_why(on_ranks):
    for of_rank in on_ranks(2, "rank_accelerate.variants", names=list(STOCK)):
        for name, ended in of_rank.items():
            assert not ended["refused"], (name, ended)
            assert not ended["planned"], (name, ended)
            assert ended["grad"] == ended["loss"] == 0, (name, ended)
            assert STOCK[name] in ended["said"][0], (name, ended)


def test_losses_that_are_not_the_models_are_refused_on_all_ranks_before_an_update(on_ranks):
    own, other = on_ranks(2, "rank_accelerate.variants", names=list(REFUSED))
    for name, ended in own.items():
        assert REFUSED[name] in ended["refused"], (name, ended)
        assert ended["refused"] == other[name]["refused"]
        assert len(ended["planned"]) <= 1, (name, ended)
