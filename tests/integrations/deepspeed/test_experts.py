"""Experts under DeepSpeed against plain training with all of them on every rank; 2 and 4 gloo ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

ROUNDING = 2e-6


def _check(results, names, copied=True):
    """``copied``: experts are divided, and but for the first plan some have copies."""
    for result in results:
        for number, name in enumerate(names):
            assert result[name]["copied"] == (copied and number > 0)
            worst = max(result[name][key] for key in ("grad", "loss", "norm"))
            assert worst <= ROUNDING, (name, result[name])


@pytest.mark.parametrize(
    ("stage", "more"), [(0, {}), (1, {"family": "qwen3_moe"}), (2, {"recompute": True}), (3, {"family": "qwen3_moe"})]
)
def test_blocks_of_transformers_are_exact(on_ranks, stage, more):
    names = ["whole_sequences", "chains some", "regrouped", "random 3"]
    _check(on_ranks(2, "rank_experts.exactness", stage=stage, names=names, **more), names, copied=False)


@pytest.mark.parametrize(
    ("stage", "more"), [(0, {"recompute": True}), (1, {}), (2, {"family": "qwen3_moe"}), (3, {"recompute": True})]
)
def test_divided_experts_are_exact(on_ranks, stage, more):
    # Under ZeRO 3 a pass takes several times as long.
    others = ["chains some", "regrouped"] if stage == 3 else ["chains none", "chains some", "regrouped", "random 3"]
    names = ["whole_sequences", *others]
    _check(on_ranks(2, "rank_experts.exactness", stage=stage, names=names, ep=2, **more), names)


@pytest.mark.parametrize(("stage", "ep"), [(0, 2), (2, 2), (3, 2), (1, 4), (3, 4)])
def test_groups_of_four_ranks_are_exact(on_ranks, stage, ep):
    names = ["whole_sequences", "random 8", "shared even", *(["random 5"] if stage < 3 or ep < 4 else [])]
    _check(on_ranks(4, "rank_experts.exactness", stage=stage, names=names, ep=ep), names)


def test_every_division_starts_from_the_same_weights_and_takes_the_same_steps(on_ranks):
    """As the seed gives them, and by the number that an expert has in the model."""
    runs = [on_ranks(4, "rank_experts.trained", stage=1, ep=ep)[0] for ep in (1, 2, 4)]
    for start, losses in runs[1:]:
        assert start == runs[0][0]
        assert losses == pytest.approx(runs[0][1], rel=2e-6)
    assert runs[0][1] == sorted(runs[0][1], reverse=True)


@pytest.mark.parametrize(
    ("stage", "asked"),
    [(0, {}), (2, {"recompute": True}), (1, {"name": "random 5"}), (2, {"ep": 1, "recompute": True}), (0, {"ep": 1})],
)
def test_every_token_is_booked_once_and_every_exchange_names_its_layer(on_ranks, stage, asked):
    """Also where forwards run again: replayed slices, recomputed layers, groups of their own in the backward."""
    results = on_ranks(2, "rank_experts.at_exchanges", stage=stage, **{"name": "chains some", **asked})
    for layer in range(2):
        assert sum(sum(result["counts"][layer]) for result in results) == 2 * results[0]["tokens"]
    for result in results:
        places = [where.split(", experts of layer ") for where in result["at"]]
        assert all(len(place) == 2 for place in places), result["at"]
        names = {(pass_.split(" of ")[0], layer) for pass_, layer in places}
        divided = asked.get("ep", 2) > 1
        assert names == ({(p, n) for p in ("forward", "backward") for n in "01"} if divided else set())
        assert result["imbalance"]
        assert all(1.0 <= ratio <= (2.0 if divided else 1.0) for ratio in result["imbalance"])


def test_copies_change_no_count_of_experts_and_no_message_where_there_are_none(on_ranks):
    for at_home, *copied in on_ranks(2, "rank_experts.bookkeeping", stage=1):
        assert at_home["messages"] == 0
        for rows in copied:
            assert rows["messages"] > 0
            assert rows["after"] != at_home["after"]
            for what in ("counts", "buffers", "experts"):
                assert rows[what] == at_home[what]
        assert at_home["experts"] == [(4, 2)] * 2
        assert at_home["bound"] == 4
        assert at_home["left"] == 0


def test_a_rank_with_another_plan_is_named_before_a_token_moves(on_ranks):
    (error, exchanges), (other, others_exchanges) = on_ranks(2, "rank_experts.another_plan")
    assert "ranks that share experts run different passes" in error
    for text in (error, other):
        assert "rank 0 runs pass 0 of plan " in text
        assert "rank 1 runs pass 0 of plan " in text
    assert exchanges == others_exchanges == 0


def test_a_plan_out_of_step_is_refused(on_ranks):
    for told in on_ranks(2, "rank_experts.out_of_step"):
        assert "does not keep the ranks in step that share experts" in told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_bit_equal_and_goes_on_on_other_ranks(on_ranks, tmp_path, stage):
    went_on = on_ranks(2, "rank_experts.save_and_go_on", stage=stage, ep=2, folder=str(tmp_path))
    assert on_ranks(2, "rank_experts.resume", stage=stage, ep=2, folder=str(tmp_path)) == went_on
    # From ZeRO 1 on a process of its own converts the checkpoint, which takes seconds.
    for ep in {0: (2, 4), 2: (2,)}.get(stage, (4,)):
        more = on_ranks(4, "rank_experts.resume", stage=stage, ep=ep, folder=str(tmp_path))
        if stage == 0 and ep == 4:
            assert all("another ep\n  found: 2 there, 4 in this recipe" in told for (told,) in more)
            continue
        for wanted, found in zip(went_on[0], more[0], strict=True):
            assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "ranks", "reentrant"), [(0, 2, True), (1, 2, False), (2, 4, None), (3, 2, False), (3, 2, None)]
)
def test_a_loop_of_others_takes_exact_steps(on_ranks, stage, ranks, reentrant):
    for result in on_ranks(ranks, "rank_experts.unmodified", stage=stage, ep=2, reentrant=reentrant):
        assert result["named"]
        assert result["error"] <= 1e-5
        assert result["messages"] > 0
        assert result["evaluation differs"] == 0.0
        assert result["bound"] == 0


def test_copies_are_refused_where_a_loop_exchanges_tokens_by_other_means(on_ranks):
    for said in on_ranks(2, "rank_experts.other_exchange"):
        assert "plugins.moe runs on AutoEP's own exchange of tokens" in said
        assert "comm_backend deepep" in said
