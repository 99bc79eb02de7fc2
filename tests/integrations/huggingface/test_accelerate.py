"""A loop of Accelerate without a Trainer: planned batch by batch, with the means of its own batches, in float64."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loop_trains_as_without_evenload(on_ranks, accumulated):
    """Gradients, losses and an evaluation inside the loop, after several updates."""
    for ended in on_ranks(2, "rank_accelerate.exactness", accumulated=accumulated):
        assert ended["grad"] < 1e-9, ended
        assert ended["loss"] < 1e-9, ended
        assert ended["evaluated"] < 1e-9, ended
        assert ended["planned"] == 4


def test_another_loss_than_the_models_is_refused(on_ranks):
    for said in on_ranks(2, "rank_accelerate.other_loss"):
        assert "the loss that reaches accelerator.backward is not the model's own" in said
        assert "model(**batch).loss" in said
