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


LENGTHS = [61, 5, 17, 33, 9, 120, 3, 40, 26, 11, 80, 7]


@pytest.mark.slow
def test_plans_of_the_packing_plugin_are_exact(on_ranks):
    """Whole samples in packs, and samples over the cap in slices; prompts carry no loss."""
    for tokens, is_cut in ((256, False), (48, True)):
        plugins = {"packing": {"enabled": True, "max_tokens": tokens}}
        for found in on_ranks(2, "rank_trainer.by_recipe", lengths=LENGTHS, plugins=plugins, masked=True):
            assert found["grad"] < ROUNDING, found
            assert found["loss"] < 1e-6, found
            assert bool(found["cut"]) == is_cut, found


@pytest.mark.slow
def test_packs_are_filled_up_and_the_largest_runs_first(on_ranks):
    packing = {"enabled": True, "max_tokens": 128, "slices": "off", "round_tokens": 16, "largest_first": True}
    alone = [70, 100, 66, 120, 90, 68]  # no two fit into one pack
    for found in on_ranks(2, "rank_trainer.by_recipe", lengths=alone, plugins={"packing": packing}, masked=True):
        assert found["grad"] < ROUNDING, found
        assert found["ran"] == sorted(found["ran"], reverse=True), found
        assert len(set(found["ran"])) > 1, found
        assert not any(tokens % 16 for tokens in found["ran"] if tokens > 1), "a dummy has one token"


@pytest.mark.slow
def test_samples_of_one_length_run_as_they_are_where_packs_gain_nothing(on_ranks):
    """Bit by bit the stock step; packs of several are fewer passes."""
    for tokens, micro_batches in ((40, 8), (256, 2)):
        plugins = {"packing": {"enabled": True, "max_tokens": tokens}}
        for found in on_ranks(2, "rank_trainer.by_recipe", lengths=[40] * 8, plugins=plugins):
            assert found["micro_batches"] == micro_batches, found
            assert found["grad"] <= (0.0 if micro_batches == 8 else ROUNDING), found


@pytest.mark.slow
def test_plans_of_the_mesh_plugin_are_exact(on_ranks):
    """A sample over the cap is shared by ranks, or cut; TRL gathers metrics in every forward, so all keep in step."""
    plugins = {"mesh": {"enabled": True, "max_tokens": 600}}
    lengths = [*LENGTHS, 1100]
    for found in on_ranks(2, "rank_trainer.by_recipe", lengths=lengths, plugins=plugins):
        assert found["grad"] < ROUNDING, found
        assert found["shared"], found


@pytest.mark.slow
def test_a_token_keeps_its_weight_where_each_rank_divides_by_its_own_targets(on_ranks):
    """In packs, in slices, and in samples that ranks share."""
    alone = {"average_tokens_across_devices": False, "masked": True}
    for plugins in ({"packing": {"enabled": True, "max_tokens": 48}}, {"mesh": {"enabled": True, "max_tokens": 600}}):
        lengths = [*LENGTHS, *([1100] if "mesh" in plugins else [])]
        for found in on_ranks(2, "rank_trainer.by_recipe", lengths=lengths, plugins=plugins, **alone):
            assert found["grad"] < ROUNDING, found
            assert found["loss"] < 1e-6, found
            assert found["shared"] if "mesh" in plugins else found["cut"], found
    names = ["mixed ring", "mixed all_to_all", "cp_groups all_gather remap", "chains none", "random 1"]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", **alone):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found


@pytest.mark.slow
def test_shared_micro_batches_and_slices_are_exact_under_ddp(on_ranks):
    names = [*SHARED, *(f"random {seed}" for seed in range(4))]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", masked=True):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
def test_the_same_under_fsdp_2(on_ranks):
    """Ranks gather parameters in every pass; what they share and cut keeps them in step."""
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    names = [*SHARED[:1], *SHARED[3:], "random 4", "random 5"]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", **fsdp):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
def test_slices_and_replays_are_exact_beside_gradient_checkpointing(on_ranks):
    names = ["chains none", "chains some", "regrouped", *(f"random {seed}" for seed in range(3, 6))]
    more = {"gradient_checkpointing": True}
    for found in on_ranks(2, "rank_trainer.exactness", names=names, file="slice_plans", masked=True, **more):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_slices_and_shared_micro_batches_are_exact_under_zero(on_ranks, zero):
    names = ["even", "mixed ring", "chains some", f"random {zero}"]
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", zero=zero):
        assert max(one["grad"] for one in found.values()) < 5e-6, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.slow
def test_what_a_run_leaves_behind_is_unchanged(on_ranks):
    """Logs, counters, evaluations, best model, early stopping, checkpoints, and resuming in the middle of an epoch."""
    for ended in on_ranks(2, "rank_trainer.unchanged"):
        stock, planned = ended["stock"], ended["planned"]
        assert stock["files"] == planned["files"]
        assert any("checkpoint-" in name for name in stock["files"])
        for run in ("first", "resumed"):
            histories = stock[run].pop("history"), planned[run].pop("history")
            assert planned[run].pop("best") == stock[run].pop("best")
            assert planned[run] == pytest.approx(stock[run], rel=1e-6)
            for one, other in zip(*histories, strict=True):
                assert other == pytest.approx(one, rel=1e-5)
        assert stock["first"]["global_step"] < stock["first"]["max_steps"], "it did not stop early"
        for name, weight in stock["weights"].items():
            assert (planned["weights"][name] - weight).norm() < 1e-6 * weight.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["rank_trainer", "rank_accelerate"])
def test_ranks_of_unlike_recipes_end_in_one_error(on_ranks, loop):
    first, second = on_ranks(2, f"{loop}.unlike_recipes")
    assert first == second
    assert first.startswith("step 1: the ranks hold different plans: no side has a majority")
