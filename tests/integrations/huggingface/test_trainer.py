"""The Trainer's own step on plans by hand and at random: loss and gradients of a stock Trainer, in float64."""

from __future__ import annotations

from importlib import import_module

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

ROUNDING = 1e-9
LENGTHS = [61, 5, 17, 33, 9, 120, 3, 40, 26, 11, 80, 7]
CUT, SHARED = {"packing": {"max_tokens": 48}}, {"mesh": {"max_tokens": 600}}
"""Recipes: samples over the cap are cut, or are shared by ranks or cut."""
OF_EACH_RANK = {"average_tokens_across_devices": False}
"""Each rank divides by its own targets."""
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
BY_GATHERING, REGROUPED = "zones, all_gather, remap", "regrouped beside shared"


def test_plans_of_the_packing_plugin_are_exact(on_ranks):
    """Whole samples in packs, and samples over the cap in slices; prompts carry no loss."""
    recipes = [{"packing": {"max_tokens": 256}}, CUT]
    for whole, cut in on_ranks(2, "rank_trainer.by_recipes", lengths=LENGTHS, recipes=recipes, masked=True):
        assert max(whole["grad"], cut["grad"]) < ROUNDING, (whole, cut)
        assert max(whole["loss"], cut["loss"]) < 1e-6, (whole, cut)
        assert cut["cut"] > whole["cut"] == 0, (whole, cut)


def test_packs_are_filled_up_and_the_largest_runs_first(on_ranks):
    packing = {"max_tokens": 128, "slices": "off", "round_tokens": 16, "largest_first": True}
    alone = [70, 100, 66, 120, 90, 68]  # no two fit into one pack
    for (found,) in on_ranks(2, "rank_trainer.by_recipes", lengths=alone, recipes=[{"packing": packing}], masked=True):
        assert found["grad"] < ROUNDING, found
        assert found["ran"] == sorted(found["ran"], reverse=True), found
        assert len(set(found["ran"])) > 1, found
        assert not any(tokens % 16 for tokens in found["ran"] if tokens > 1), "a dummy has one token"


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, id="ddp"), pytest.param(OF_EACH_RANK, id="of_each_rank"), only_full(FSDP, id="fsdp")],
)
def test_what_samples_of_a_pack_begin_with_in_common_is_computed_once(more, on_ranks):
    """Prompts carry no loss in some samples; a sample is the beginning of others; and slices share nothing. Llama's
    norms round to float32, which gradients of several samples reach as a sum."""
    recipes = [{"packing": {"max_tokens": 256, "trees": trees}} for trees in (True, False)]
    recipes += [{"packing": {"max_tokens": 48, "slices": "even"}}]
    lengths, trunk = [61, 40, 45, 53, 49, 120, 43, 40, 46, 41, 80, 47], 40
    masked = "fsdp" not in more
    for shared, alone, cut in on_ranks(
        2, "rank_trainer.by_recipes", lengths=lengths, recipes=recipes, masked=masked, trunk=trunk, **more
    ):
        assert max(alone["grad"], cut["grad"]) < ROUNDING, (alone, cut)
        assert shared["grad"] < 1e-7, shared
        assert max(one["loss"] for one in (shared, alone, cut)) < 1e-6, (shared, alone, cut)
        assert sum(shared["ran"]) <= sum(alone["ran"]) - trunk, (shared, alone)


def test_trees_that_are_asked_for_and_that_no_samples_share_are_named(caplog):
    """In a loop of one process, whose first step has none."""
    import_module("evenload.api").load_plugins()
    runs = import_module("rank_trainer")
    runs.forget_layout()
    own = runs.TrainingArguments(**runs.arguments(per_device_train_batch_size=4))
    rows = runs.samples_of([9, 30, 4, 17])
    with runs.planned_by(runs.recipe(packing={"max_tokens": 256, "trees": True})) as seen:
        runs.Trainer(runs.build_model(), own, train_dataset=rows, data_collator=runs.collate).train()
    assert seen.plans
    said = [one.getMessage() for one in caplog.records if "plugins.packing.trees" in one.getMessage()]
    assert said == ["plugins.packing.trees has no effect in the first step: no samples of a pack begin alike"]


def test_samples_of_one_length_run_as_they_are_where_packs_gain_nothing(on_ranks):
    """Bit by bit the stock step; packs of several are fewer passes."""
    recipes = [{"packing": {"max_tokens": tokens}} for tokens in (40, 256)]
    for stock, packed in on_ranks(2, "rank_trainer.by_recipes", lengths=[40] * 8, recipes=recipes):
        assert (stock["micro_batches"], packed["micro_batches"]) == (8, 2)
        assert stock["grad"] == 0 < packed["grad"] < ROUNDING


def test_plans_of_the_mesh_plugin_are_exact(on_ranks):
    """A sample over the cap is shared by ranks, or cut; TRL gathers metrics in every forward, so all keep in step."""
    for (found,) in on_ranks(2, "rank_trainer.by_recipes", lengths=[*LENGTHS, 1100], recipes=[SHARED]):
        assert found["grad"] < ROUNDING, found
        assert found["shared"], found


def test_a_token_keeps_its_weight_where_each_rank_divides_by_its_own_targets(on_ranks):
    """In packs, in slices, and in samples that ranks share."""
    more = {"lengths": [*LENGTHS, 1100], "recipes": [CUT, SHARED], "masked": True, **OF_EACH_RANK}
    for cut, shared in on_ranks(2, "rank_trainer.by_recipes", **more):
        assert max(cut["grad"], shared["grad"]) < ROUNDING, (cut, shared)
        assert max(cut["loss"], shared["loss"]) < 1e-6, (cut, shared)
        assert cut["cut"], cut
        assert shared["shared"], shared


@pytest.mark.parametrize(
    ("names", "more"),
    [
        pytest.param(["all_to_all", BY_GATHERING], {}, id="shared"),
        only_full(["all_gather", "chain", REGROUPED, "0", "1", "2", "3"], {}, id="cut"),
        pytest.param([BY_GATHERING, "1"], OF_EACH_RANK, id="of_each_rank"),
        only_full(["ring", "all_to_all", "chain"], OF_EACH_RANK, id="of_each_rank-all"),
        pytest.param(["ring", "4"], FSDP, id="fsdp"),
        only_full([BY_GATHERING, "chain", REGROUPED, "5"], FSDP, id="fsdp-all"),
    ],
)
def test_shared_micro_batches_and_slices_are_exact(names, more, on_ranks):
    """Under FSDP 2 ranks gather parameters in every pass; what they share and cut keeps them in step."""
    for found in on_ranks(
        4, "rank_trainer.exactness", names=names, file="shared_plans", masked="fsdp" not in more, **more
    ):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        if "average_tokens_across_devices" not in more:  # where the logged loss is a mean over ranks
            assert max(one["loss"] for one in found.values()) < 1e-6, found


@pytest.mark.parametrize(
    "names",
    [["slices, half replayed", "3"], only_full(["slices", "regrouped", "4", "5"])],
    ids=" ".join,
)
def test_slices_and_replays_are_exact_beside_gradient_checkpointing(on_ranks, names):
    more = {"masked": True, "gradient_checkpointing": True}
    for found in on_ranks(2, "rank_trainer.exactness", names=names, file="slice_plans", **more):
        assert max(one["grad"] for one in found.values()) < ROUNDING, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


CHAIN = "chain, half replayed"


@pytest.mark.parametrize(
    ("zero", "names"),
    [pytest.param(zero, [name], id=str(zero)) for zero, name in enumerate(("zones", "ring", CHAIN, CHAIN))]
    + [only_full(zero, ["zones", "ring", CHAIN, str(zero)], id=f"{zero}-all") for zero in range(4)],
)
def test_slices_and_shared_micro_batches_are_exact_under_zero(on_ranks, zero, names):
    for found in on_ranks(4, "rank_trainer.exactness", names=names, file="shared_plans", zero=zero):
        assert max(one["grad"] for one in found.values()) < 5e-6, found
        assert max(one["loss"] for one in found.values()) < 1e-6, found


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


def test_ranks_of_unlike_recipes_end_in_one_error(on_ranks):
    first, second = on_ranks(2, "rank_trainer.unlike_recipes")
    assert first == second
    assert first.startswith("step 1: the ranks hold different plans: no side has a majority")
