"""Pairs, single and generated answers: what TRL's Trainers train under plans of units is what they train without, and
so is what keeps its rows in place and loses their padding."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE = 1e-9
PLANNED = ["dpo", "reward", "kto", "grpo", "rloo"]
OF_STEP = ("entropy", "logits/", "mean_token_accuracy", "min_reward", "max_reward")
"""Figures that are those of a step, where stock ones are means over its batches."""
OF_SIDES = (*OF_STEP, "rewards/", "logps/")
"""Those of single answers, of which some are chosen."""


def check(kind: str, one: dict, named: tuple[str, ...] = ()) -> None:
    assert one["idle"] == [], (kind, one)
    assert one["planned"] > 0, (kind, one)
    assert one["grad"] < DOUBLE < one["size"], (kind, one)
    assert one["packed"] > 0, (kind, one)
    assert one["shared"] > 0, (kind, one)
    named += ("loss", "train_loss") if kind == "rloo" else ()  # advantages are centred, and rounding is left
    apart = {key: off for key, off in one["apart"].items() if off > 1e-6 and not key.startswith(named or "-")}
    assert not apart, (kind, apart)


@pytest.fixture(scope="module")
def compared() -> Any:
    """`rank_units.compared`, of one rank."""
    from evenload.api import load_plugins

    load_plugins()
    return import_module("rank_units").compared


def test_units_change_ranks_and_gradients_and_figures_stay(on_ranks):
    for found in on_ranks(2, "rank_units.errors", kinds=PLANNED, accumulate=1):
        for kind, one in found.items():
            check(kind, one)


@pytest.mark.parametrize("kinds", [["kto", "grpo"], only_full(["dpo", "reward", "rloo"])], ids=" ".join)
def test_adapters_and_several_batches_a_step_are_exact_too(kinds, on_ranks):
    for found in on_ranks(2, "rank_units.errors", kinds=kinds, lora=True, steps=2):
        for kind, one in found.items():
            check(kind, one, OF_SIDES if kind == "kto" else OF_STEP)


def test_micro_batches_keep_under_the_cap_of_all_rows_of_their_units(on_ranks):
    for found in on_ranks(2, "rank_units.errors", kinds=["dpo"], max_tokens=200):
        check("dpo", found["dpo"], OF_STEP)
        assert found["dpo"]["packed"], found
        assert 100 < found["dpo"]["most_slots"] <= 200, found


def test_pairs_of_one_answer_end_as_they_do_by_themselves(on_ranks):
    for ends in on_ranks(2, "rank_units.with_pairs_of_one"):
        assert ends["stock"] == ends["planned"]
        assert "a batch has units with fewer than 2 rows" in ends["said"]
        assert "rows of input_ids" in ends["said"]


def test_batches_of_unlike_counts_share_within_each_alone(compared):
    """The second one has three pairs: a mean of both would weigh the pairs of each by another number than its own."""
    one = compared("dpo", num_rows=7)
    assert one["grad"] < DOUBLE < one["size"]
    assert one["shared"] > 0
    assert (one["idle"], one["planned"]) == ([], 0)


@pytest.mark.parametrize(
    ("kind", "trees", "count"), [("kto", {"trees": True}, 1), ("kto", {}, 0), ("dpo", {"trees": True}, 0)]
)
def test_trees_that_are_asked_for_and_share_nothing_are_named_once(kind, trees, count, compared, caplog):
    """KTO's single answers here are each to a prompt of its own."""
    runs = import_module("rank_units")
    with runs.planned_by(runs.recipe(packing={"max_tokens": 512, **trees})) as seen:
        runs.trained(kind, steps=2, **({"loss_type": "apo_zero_unpaired"} if kind == "kto" else {}))
    assert len(seen.plans) == 2
    said = [record for record in caplog.records if "plugins.packing.trees" in record.getMessage()]
    assert [(one.levelname, one.getMessage()) for one in said] == [
        ("WARNING", "plugins.packing.trees has no effect in the first step: no rows of it begin alike")
    ] * count


def test_values_of_units_travel_with_them(compared):
    check("dpo", compared("dpo", precompute_ref_log_probs=True), OF_STEP)


OF_ROWS = [
    ("grpo", {"max_tokens": 24}),
    ("grpo", {"loss_type": "sapo", "lora": True, "beta": 0.1, "num_iterations": 2, "steps": 2}),
    ("rloo", {"num_iterations": 2, "steps": 2}),
    *(only_full("grpo", {"loss_type": kind}) for kind in ("dr_grpo", "grpo", "cispo", "vespo", "luspo")),
]
"""The first is a sum over the step's tokens, in micro-batches of unlike counts of rows; the others are means over rows.
References and log-probabilities of the step before travel with them."""


@pytest.mark.parametrize(("kind", "more"), OF_ROWS, ids=str)
def test_answers_change_places_with_their_log_probabilities_whatever_loss_sums_over_them(kind, more, compared):
    check(kind, compared(kind, **more), (*OF_STEP, "kl", "clip_ratio", "cispo_clip_ratio"))


STAYS = [
    ("dpo", {"loss_type": "sft"}, "a loss that is not the sum of its samples'"),
    ("dpo", {"loss_type": "aot"}, "loss_type aot sorts the answers"),
    ("kto", {"loss_type": "kto"}, "a KL term that is the mean of the micro-batch"),
    ("grpo", {"loss_type": "bnpo"}, "a loss that is not the sum of its samples'"),
    ("grpo", {"top_entropy_quantile": 0.5}, "top_entropy_quantile ranks the tokens"),
    ("distillation", {}, "does not know the batches of trl.trainer.distillation_trainer"),
]


@pytest.mark.parametrize(("kind", "more", "why"), STAYS, ids=str)
def test_what_is_no_mean_of_units_stays_in_place_without_padding_and_says_so(kind, more, why, compared):
    one = compared(kind, **more)
    assert one["planned"] == 0
    assert why in one["idle"][0]
    assert "their padding is not computed" in one["idle"][0]
    assert one["packed"] > 0
    # Distillation computes in float32 whatever its model is.
    assert one["grad"] < (2e-6 if kind == "distillation" else DOUBLE)


@pytest.mark.parametrize("batch_term", ["mean of the batch", only_full("mean of the gaps, squared")])
def test_a_term_of_the_whole_batch_is_measured_where_a_run_begins_with_its_own_reference(batch_term, compared):
    one = compared("dpo", penalty=batch_term)
    assert one["planned"] == 0
    assert "sum of its samples" in one["idle"][0] or "mean of its units" in one["idle"][0]
    assert one["grad"] < DOUBLE
