"""Slices, replays and regrouped backward passes: without an engine in float64, then on real DeepSpeed engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.program import lower
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.model import build_model, recompute_layers
from evenload.integrations.deepspeed.engine.stage import call_of
from evenload.integrations.deepspeed.plain import plain_gradients, relative_error
from evenload.integrations.host.scoring import token_losses
from evenload.runtime.attention.labels import loss_divisor, readers_of
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore

ROUNDING = 2e-6
HAND = ("chains none", "chains some", "chains all", "regrouped")
EQUAL = ("chains none equal", "chains some equal", "chains all equal")
RANDOM = tuple(f"random {seed}" for seed in range(12))


def _model(family, plain=False):
    groups = {} if family == "gpt" else {"num_query_groups": 2}
    model = {"family": family, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    recipe = recipes.parse({"trainer": "deepspeed", "model": {**model, **groups}, "data": {"max_length": 200}})
    return build_model(recipe, **({"attn_implementation": "sdpa"} if plain else {})).double()


def _run(model, plan, tokens_of, *, labels=None, equal=False):
    """Loss and gradients of a plan on a bare model: the passes of one rank after those of the other."""
    model.zero_grad(set_to_none=True)
    total, divisor = 0.0, loss_divisor(plan.lengths, labels)
    for rank in range(plan.limits.num_ranks):
        store, losses = PrefixStore.of_plan(plan), {}
        for one in lower(plan, 0, rank, "in step" if equal else "idle"):
            if one.kind == "backward":
                losses.pop(one.graph).backward()
                continue
            pack = build_pack(one.micro_batch, tokens_of, "cpu", store, **readers_of(labels))
            if one.kind == "forward_kv":
                with torch.no_grad():
                    logits = model(**call_of(pack), logits_to_keep=1).logits
                assert logits.shape[1] == 1
            else:
                losses_T = token_losses(model(**call_of(pack)).logits[0], pack)
                weighed_T = losses_T if pack.weights_T is None else losses_T * pack.weights_T
                losses[one.graph] = weighed_T.sum() / divisor
                total += float(losses[one.graph].detach())
        if store is not None:
            store.check_empty()
        assert not losses
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def _not_recomputed(passes):
    """The graphs of replays and of dummies."""
    return {
        one.graph
        for one in passes
        if one.kind == "recompute_forward" or (one.kind == "forward" and not one.micro_batch.slices)
    }


def _by_name(slice_plans, name):
    """``random 7``, or a function of slice_plans with its arguments: ``chains some equal``."""
    kind, *words = name.split()
    if kind == "random":
        return slice_plans.random_plan(int(words[0]))
    return getattr(slice_plans, kind)(*words[:1], **dict.fromkeys(words[1:], True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "family", ["llama", "gpt", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "qwen3"))]
)
def test_every_plan_is_exact_in_float64(slice_plans, family, recompute):
    model, plain = _model(family), _model(family, plain=True)
    if recompute:
        recompute_layers(model)
    names = (*HAND, *RANDOM[:6]) if family == "llama" else ("chains some", "regrouped", *RANDOM[3:5])
    for number, name in enumerate(names):
        plan = _by_name(slice_plans, name)
        labels = slice_plans.labels_of(plan, number)
        loss, wanted = plain_gradients(plain, slice_plans.tokens_of(plan), plan.lengths, labels)
        found_loss, found = _run(model, plan, slice_plans.tokens_of(plan), labels=labels, equal=recompute)
        assert found_loss == pytest.approx(loss, rel=1e-12), name
        assert relative_error(found, wanted) < 1e-9, name


def test_plain_training_takes_labels_as_transformers_does(slice_plans):
    plan = slice_plans.whole_sequences()
    model, tokens_of, labels = _model("llama", plain=True), slice_plans.tokens_of(plan), slice_plans.labels_of(plan, 1)
    loss, gradients = plain_gradients(model, tokens_of, plan.lengths, labels)
    model.zero_grad()
    total = 0.0
    for i in np.flatnonzero(labels.targets):
        batch = {"input_ids": torch.tensor(tokens_of(i))[None], "labels": torch.tensor(labels.of(i))[None]}
        own = model(**batch, num_items_in_batch=labels.targets.sum()).loss
        own.backward()
        total += float(own.detach())
    # Transformers takes logits to float32 for a loss.
    assert loss == pytest.approx(total, rel=1e-6)
    assert relative_error(gradients, {name: p.grad for name, p in model.named_parameters()}) < 1e-6


def test_random_plans_are_of_every_kind(slice_plans):
    plans = [slice_plans.random_plan(int(name.split()[1])) for name in RANDOM]
    assert any(plan.cut and plan.backward for plan in plans)
    assert any(plan.cut and plan.kept and plan.replayed for plan in plans)
    assert any(plan.cut and not plan.replayed for plan in plans)
    kinds = [tuple(op.kind for op in plan.order[0]) for plan in plans]
    assert any(row != tuple(sorted(row, reverse=True)) for row in kinds)
    assert max(len(plan.micro_batches) for plan in plans) >= 16


def test_a_replay_needs_no_more_than_its_prefix(slice_plans):
    """Of micro-batches without gradients only slices that a replay reads and does not write run."""
    for name in ("chains all", "regrouped"):
        for rank in (0, 1):
            ran = lower(_by_name(slice_plans, name), 0, rank, "idle")
            pieces = [s for one in ran if one.kind == "forward_kv" for s in one.micro_batch.slices]
            assert {s.sequence for s in pieces} == {rank}
            # Regrouped, no forward slice starts where the backward does: all of the sequence runs.
            assert max(s.stop for s in pieces) == ((160, 75) if name == "regrouped" else (150, 60))[rank]


def test_ranks_out_of_step_are_brought_into_step(slice_plans):
    for name in (*HAND, *EQUAL, *(f"random {seed}" for seed in range(100))):
        plan = _by_name(slice_plans, name)
        rows = [lower(plan, 0, rank, "in step") for rank in (0, 1)]
        assert [one.kind == "backward" for one in rows[0]] == [one.kind == "backward" for one in rows[1]], name
        for rank, row in enumerate(rows):
            own = [one[:3] for one in row if one.micro_batch.slices]
            free = lower(plan, 0, rank, "idle")
            assert own == [one[:3] for one in free if one.micro_batch.slices], name
            started = [one.graph for one in row if one.kind in ("forward", "recompute_forward")]
            ended = [one.graph for one in row if one.kind == "backward"]
            assert sorted(started) == sorted(ended) == sorted(set(ended)), name


def test_ranks_in_step_get_no_dummies(slice_plans):
    rows = [lower(slice_plans.chains("none", equal=True), 0, rank, "in step") for rank in (0, 1)]
    assert [len(row) for row in rows] == [32, 32]
    assert sum(not one.micro_batch.slices for one in rows[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        (0, False, (*HAND, *RANDOM[:4])),
        (1, True, (*HAND, *RANDOM[4:8])),
        (2, False, (*HAND, *RANDOM[8:])),
        (2, True, HAND),
        (3, False, (*EQUAL[:2], "regrouped", *RANDOM[:2])),
        (3, True, ("chains some equal", "chains all equal", "regrouped", *RANDOM[3:5])),
    ],
)
def test_gradients_are_those_of_plain_training(on_ranks, slice_plans, stage, recompute, names):
    results = on_ranks(2, "rank_slices.exactness", stage=stage, names=list(names), recompute=recompute)
    for name in names:
        for result in results:
            assert result[name]["grad"] <= ROUNDING, name
            assert result[name]["loss"] <= ROUNDING, name
            # Under ZeRO 3 nothing stays gathered; before it nothing is.
            assert result[name]["gathered"] == 0, name
        plan = _by_name(slice_plans, name)
        for rank, result in enumerate(results):
            ran = [tuple(piece) for j in plan.of_rank(rank, "B") for piece in plan.passes("B")[j].slices]
            assert sorted(result[name]["executed"]) == sorted(ran), name
            passes = lower(plan, 0, rank, "in step" if stage == 3 else "idle")
            backwards = sum(one.kind == "backward" for one in passes)
            # A backward runs the layers once more, unless it has just been replayed (ZeRO 3: if all have).
            mixed = stage == 3 and any(plan.micro_batches[i].slices for i in plan.kept)
            whole = [one for one in passes if one.kind == "backward" and one.graph in _not_recomputed(passes)]
            again = recompute * (backwards - (0 if mixed else len(whole)))
            assert result[name]["forwards"] == len(passes) - backwards + again, name


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(0, False), (1, False), (2, True), (3, True)])
def test_bf16_within_its_rounding(on_ranks, stage, recompute):
    names = ["whole_sequences", "chains some", "regrouped"]
    for result in on_ranks(2, "rank_slices.exactness", stage=stage, names=names, recompute=recompute, dtype="bf16"):
        for name in names:
            assert result[name]["grad"] <= 3e-2, name
            assert result[name]["loss"] <= 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(0, True), (2, False), (3, False)])
def test_slices_train_like_whole_sequences(on_ranks, slice_plans, stage, recompute):
    wanted, start, weights, _ = on_ranks(2, "rank_slices.trained", stage=1, name="whole_sequences")[0]
    plan = slice_plans.chains("some")
    ranks = on_ranks(2, "rank_slices.trained", stage=stage, name="chains some", recompute=recompute)
    for rank, (losses, _, found, spans) in enumerate(ranks):
        for kind in ("F", "B"):
            numbers = [span.micro_batch for span in spans if span.kind == kind and span.micro_batch >= 0]
            assert set(numbers) <= set(plan.of_rank(rank, kind))
            assert len(numbers) == len(set(numbers))
        backwards = [span.micro_batch for span in spans if span.kind == "B" and span.micro_batch >= 0]
        assert sorted(backwards) == sorted(plan.of_rank(rank, "B"))
        assert {s.micro_batch for s in spans if s.kind == "R"} == {j for j in backwards if plan.forward_of[j] is None}
        assert [s.kind for s in spans if s.kind in "GU"] == (["U"] if stage == 3 else ["G", "U"])
        assert losses == pytest.approx(wanted, rel=2e-6)
        for name, weight in weights.items():
            moved = (weight - start[name]).norm()
            assert (found[name] - weight).norm() <= 1e-3 * moved, name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_mutants_are_caught(on_ranks, stage):
    for found in on_ranks(2, "rank_slices.mutants", stage=stage):
        sound = {name: errors for name, errors in found.items() if name.startswith("sound")}
        assert sound
        assert all(max(errors) <= ROUNDING for errors in sound.values()), sound
        broken = {name: errors for name, errors in found.items() if name not in sound}
        assert len(broken) == (1 if stage == 3 else 3)
        assert all(max(errors) > 1e-3 for errors in broken.values()), broken


@pytest.mark.slow
def test_backwards_in_a_row_release_what_they_gathered(on_ranks):
    for seen in on_ranks(2, "rank_slices.gathered_while_backward_ends", counted=True):
        assert len(seen) == 16
        assert max(seen) <= seen[0] < 10
    for seen in on_ranks(2, "rank_slices.gathered_while_backward_ends", counted=False):
        assert seen[0] < 10 < min(seen[1:])


@pytest.mark.slow
def test_what_would_not_be_exact_is_refused(on_ranks):
    for told in on_ranks(2, "rank_slices.refused"):
        assert "act_fn drops 0.1" in told[0]
        assert "names no cp_comm" in told[1]


def test_a_model_without_layer_numbers_runs_no_slices(slice_plans):
    model = _model("llama")
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    cut, whole = slice_plans.chains("none"), slice_plans.whole_sequences()
    with pytest.raises(EvenloadError, match="no layer_idx"):
        _run(model, cut, slice_plans.tokens_of(cut))
    _run(model, whole, slice_plans.tokens_of(whole))
