"""Experts under DeepSpeed against plain training with all of them on every rank; 2 and 4 gloo ranks."""

from __future__ import annotations

import pytest
import torch
from evenload.core.plan.branches import COPIED
from harness.cases import only_full

pytestmark = pytest.mark.slow


PLANS = ["packs", "slices, half replayed", "regrouped", "8"]


def _check(results, copied=True):
    """``copied``: experts are divided, and but for the first plan some have copies."""
    for result in results:
        first, *others = (COPIED in found["branches"] for found in result["found"][0])
        assert not first
        assert others == [copied] * len(others)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        only_full(0, {"family": "mixtral"}),
        only_full(1, {"family": "qwen3_moe"}),
        only_full(2, {"family": "mixtral", "recompute": True}),
        (3, {"family": "qwen3_moe"}),
    ],
)
def test_blocks_of_transformers_are_exact(exactness, stage, more):
    _check(exactness(2, stage=stage, names=PLANS[:3], **more), copied=False)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        only_full(0, {"recompute": True}, id="zero0, recomputed"),
        only_full(1, {}, id="zero1"),
        pytest.param(2, {"family": "qwen3_moe", "recompute": True}, id="zero2, qwen3_moe"),
        only_full(3, {"recompute": True}, id="zero3, recomputed"),
    ],
)
def test_divided_experts_are_exact(exactness, stage, more):
    _check(exactness(2, stage=stage, names=PLANS, ep=2, **{"family": "mixtral", **more}))


@pytest.mark.parametrize(("stage", "ep"), [only_full(0, 2), only_full(2, 2), only_full(3, 2), only_full(1, 4), (3, 4)])
def test_groups_of_four_ranks_are_exact(exactness, stage, ep):
    names = ["packs", *(["5"] if stage < 3 else []), "ring, in step"]
    _check(exactness(4, stage=stage, names=names, ep=ep, family="mixtral"))


def test_every_division_starts_from_the_same_weights_and_takes_the_same_steps(on_ranks):
    """As the seed gives them, and by the number that an expert has in the model."""
    how = {"stage": 1, "name": "packs", "clip_grad": 0.5, "family": "mixtral"}
    runs = [on_ranks(4, "trained", ep=ep, **how)[0] for ep in (1, 2, 4)]
    for run in runs[1:]:
        assert all(torch.equal(weight, runs[0]["start"][name]) for name, weight in run["start"].items())
        assert run["start"].keys() == runs[0]["start"].keys()
        assert run["losses"] == pytest.approx(runs[0]["losses"], rel=2e-6)
    assert runs[0]["losses"] == sorted(runs[0]["losses"], reverse=True)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        only_full("slices, half replayed", {"stage": 0, "ep": 2}),
        ("slices, half replayed", {"stage": 2, "ep": 2, "recompute": True}),
        ("8", {"stage": 1, "ep": 2}),
        only_full("slices, half replayed", {"stage": 2, "ep": 1, "recompute": True}),
        ("packs", {"stage": 0, "ep": 1}),
    ],
)
def test_every_token_is_booked_once_and_every_exchange_names_its_layer(on_ranks, name, asked):
    """Also where forwards run again: replayed slices, recomputed layers, groups of their own in the backward."""
    results, divided = on_ranks(2, "expert_jobs.at_exchanges", name=name, **asked), asked["ep"] > 1
    for layer in range(2):
        assert sum(sum(result["counts"][layer]) for result in results) == 2 * results[0]["tokens"]
    for result in results:
        places = [where.split(", experts of layer ") for where in result["at"]]
        assert all(len(place) == 2 for place in places), result["at"]
        names = {(pass_.split(" of ")[0], layer) for pass_, layer in places}
        assert names == ({(p, n) for p in ("forward", "backward") for n in "01"} if divided else set())
        assert result["imbalance"]
        assert all(1.0 <= ratio <= (2.0 if divided else 1.0) for ratio in result["imbalance"])


def test_copies_change_no_count_of_experts_and_no_message_where_there_are_none(on_ranks):
    for at_home, *copied in on_ranks(2, "expert_jobs.bookkeeping"):
        assert at_home["messages"] == 0
        for rows in copied:
            assert rows["messages"] > 0
            assert rows["after"] != at_home["after"]
            for what in ("counts", "buffers", "experts"):
                assert rows[what] == at_home[what]
        assert at_home["experts"] == [(4, 2)] * 2
        assert at_home["bound"] == 4
        assert at_home["left"] == 0


def test_a_rank_with_another_plan_is_named_before_a_token_moves_and_one_out_of_step_is_refused(on_ranks):
    (error, exchanges, free), (other, others_exchanges, _) = on_ranks(2, "expert_jobs.unfit_plans")
    assert "ranks that share experts run different passes" in error
    for text in (error, other):
        assert "rank 0 runs pass 0 of plan " in text
        assert "rank 1 runs pass 0 of plan " in text
    assert exchanges == others_exchanges == 0
    assert "does not keep the ranks in step that share experts" in free


@pytest.mark.parametrize(
    ("stage", "ranks", "reentrant"),
    [only_full(0, 2, True), (1, 2, True), (2, 4, None), (3, 2, False), only_full(3, 2, None)],
)
def test_a_loop_of_others_takes_exact_steps(on_ranks, stage, ranks, reentrant):
    for result in on_ranks(ranks, "expert_jobs.unmodified", stage=stage, ep=2, reentrant=reentrant):
        assert result["named"]
        assert result["error"] <= 1e-5
        assert result["messages"] > 0
        assert result["evaluation differs"] == 0.0
        assert result["bound"] == 0


def test_copies_are_refused_where_a_loop_exchanges_tokens_by_other_means(on_ranks):
    for said in on_ranks(2, "expert_jobs.other_exchange"):
        assert "plugins.moe runs on AutoEP's own exchange of tokens" in said
        assert "comm_backend deepep" in said
