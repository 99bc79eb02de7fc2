"""The Trainer's own step on plans by hand and at random: loss and gradients of a stock Trainer, in float64."""

from __future__ import annotations

import pytest

ROUNDING = 1e-9
SHARED = (
    "mixed ring",
    "mixed all_gather",
    "mixed all_to_all",
    "cp_groups all_gather remap",
    "chains none",
    "regrouped",
)


@pytest.mark.slow
def test_shared_micro_batches_and_slices_are_exact_under_ddp(on_ranks):
    names = [*SHARED, *(f"random {seed}" for seed in range(8))]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", masked=True):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
def test_the_same_under_fsdp_2(on_ranks):
    """Ranks gather parameters in every pass; what they share and cut keeps them in step."""
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    names = [*SHARED[:1], *SHARED[3:], *(f"random {seed}" for seed in range(4))]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", **fsdp):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
def test_slices_and_replays_are_exact_beside_gradient_checkpointing(on_ranks):
    names = ["chains none", "chains some", "regrouped", *(f"random {seed}" for seed in range(6))]
    more = {"gradient_checkpointing": True}
    for found in on_ranks(2, "rank_trainer.exactness", names=names, file="slice_plans", masked=True, **more):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found
