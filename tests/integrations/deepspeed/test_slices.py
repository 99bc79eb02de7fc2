"""Slices, replays and regrouped backward passes: without an engine in float64, then on real DeepSpeed engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.program import lower
from evenload.core.recipe import recipe as recipes
from evenload.integrations.host.scoring import token_losses
from evenload.runtime.attention.labels import loss_divisor, readers_of
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.training.proof.compare import compare_number
from evenload.training.proof.weighing import scale_of
from harness.cases import only_full
from harness.lazy import LazyModule
from harness.proof import LENGTHS, ROUNDING, exact, labels_in_turn, tokens
from harness.proof.by_hand import by_hand
from harness.proof.drawn import random_plan

engine = LazyModule("evenload.integrations.deepspeed.engine.model")
stage = LazyModule("evenload.integrations.deepspeed.engine.stage")
plain_training = LazyModule("evenload.integrations.deepspeed.plain")

HAND = ("slices", "slices, half replayed", "slices, all replayed", "regrouped")
EQUAL = ("slices, in step", "slices, in step, half replayed", "slices, in step, all replayed")
ODD = (30, 1, 64, 2, 17, 1)
"""Lengths, of which some have no target."""


def _plan(name, lengths=LENGTHS):
    sizes = {"num_ranks": 2, "num_stages": 1, "layers_per_stage": 2}
    return random_plan(int(name), lengths, recompute=False, **sizes) if name.isdigit() else by_hand(name, **sizes)


def _model(family, plain=False):
    groups = {} if family == "gpt" else {"num_query_groups": 2}
    model = {"family": family, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    recipe = recipes.parse({"trainer": "deepspeed", "model": {**model, **groups}, "data": {"max_length": 64}})
    return engine.build_model(recipe, **({"attn_implementation": "sdpa"} if plain else {})).double()


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
                    logits = model(**stage.call_of(pack), logits_to_keep=1).logits
                assert logits.shape[1] == 1
            else:
                losses_T = token_losses(model(**stage.call_of(pack)).logits[0], pack)
                weighed_T = losses_T if pack.weights_T is None else losses_T * pack.weights_T
                losses[one.graph] = weighed_T.sum() / divisor
                total += float(losses[one.graph].detach())
        if store is not None:
            store.check_empty()
        assert not losses
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "family", ["llama", "gpt", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "qwen3"))]
)
def test_every_plan_is_exact_in_float64(family, recompute):
    model, plain = _model(family), _model(family, plain=True)
    if recompute:
        engine.recompute_layers(model)
    names = (*HAND, "0", "2", "3", "7") if family == "llama" else ("slices, half replayed", "regrouped", "3")
    for number, name in enumerate(names):
        lengths = ODD if name.isdigit() else LENGTHS
        plan, data, labels = _plan(name, lengths), tokens(lengths), labels_in_turn(number, lengths)
        loss, wanted = plain_training.plain_gradients(plain, data, plan.lengths, labels)
        found_loss, found = _run(model, plan, data, labels=labels, equal=recompute)
        assert compare_number(found_loss, loss, scale_of(labels, plan.lengths)) < 1e-12, name
        assert plain_training.relative_error(found, wanted) < 1e-9, name


def test_plain_training_takes_labels_as_transformers_does():
    model, data, labels = _model("llama", plain=True), tokens(), labels_in_turn(1)
    loss, gradients = plain_training.plain_gradients(model, data, np.array(LENGTHS), labels)
    model.zero_grad()
    total = 0.0
    for i in np.flatnonzero(labels.targets):
        batch = {"input_ids": torch.tensor(data(i))[None], "labels": torch.tensor(labels.of(i))[None]}
        own = model(**batch, num_items_in_batch=labels.targets.sum()).loss
        own.backward()
        total += float(own.detach())
    # Transformers takes logits to float32 for a loss.
    assert loss == pytest.approx(total, rel=1e-6)
    assert plain_training.relative_error(gradients, {name: p.grad for name, p in model.named_parameters()}) < 1e-6


def test_a_replay_needs_no_more_than_its_prefix():
    """Of micro-batches without gradients only slices that a replay reads and does not write run."""
    for name, stops in (("slices, all replayed", (60, 32)), ("regrouped", (64, 41))):
        for rank, sequence in enumerate((1, 4)):
            ran = lower(_plan(name), 0, rank, "idle")
            pieces = [s for one in ran if one.kind == "forward_kv" for s in one.micro_batch.slices]
            assert {s.sequence for s in pieces} == {sequence}
            # Regrouped, no forward slice starts where the backward does: all of the sequence runs.
            assert max(s.stop for s in pieces) == stops[rank], name


def test_ranks_out_of_step_are_brought_into_step():
    for name in (*HAND, *EQUAL, *map(str, range(50))):
        plan = _plan(name)
        rows = [lower(plan, 0, rank, "in step") for rank in (0, 1)]
        assert [one.kind == "backward" for one in rows[0]] == [one.kind == "backward" for one in rows[1]], name
        for rank, row in enumerate(rows):
            own = [one[:3] for one in row if one.micro_batch.slices]
            free = lower(plan, 0, rank, "idle")
            assert own == [one[:3] for one in free if one.micro_batch.slices], name
            started = [one.graph for one in row if one.kind in ("forward", "recompute_forward")]
            ended = [one.graph for one in row if one.kind == "backward"]
            assert sorted(started) == sorted(ended) == sorted(set(ended)), name


def test_ranks_in_step_get_no_dummies():
    rows = [lower(_plan("slices, in step"), 0, rank, "in step") for rank in (0, 1)]
    assert [len(row) for row in rows] == [32, 32]
    assert sum(not one.micro_batch.slices for one in rows[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        only_full(0, False, (*HAND, "0", "1", "2", "3")),
        (0, True, (*HAND[1:], "2", "8")),
        (1, False, (*HAND[:2], "3", "14")),
        only_full(1, True, (*HAND, "4", "5", "6", "7")),
        only_full(2, False, (*HAND, "8", "9", "10", "11")),
        (2, True, (*HAND[1:], "4", "5")),
        only_full(3, False, (*EQUAL[:2], "regrouped", "2", "8")),
        (3, True, (EQUAL[1], "5", "14")),
        only_full(3, True, (EQUAL[2], "regrouped", "2", "8")),
    ],
)
def test_gradients_are_those_of_plain_training(on_ranks, stage, recompute, names):
    results = on_ranks(2, "exactness", stage=stage, names=list(names), recompute=recompute)
    exact([result["found"][0] for result in results], ROUNDING)
    for result in results:
        # Under ZeRO 3 nothing stays gathered; before it nothing is.
        assert result["gathered"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [(1, False, HAND[1:]), (1, True, HAND[1:]), (3, True, ("packs", HAND[1])), only_full(3, True, (*HAND, EQUAL[1]))],
)
def test_layers_run_no_more_often_than_passes_need(on_ranks, stage, recompute, names):
    results = on_ranks(2, "exactness", stage=stage, names=list(names), recompute=recompute)
    for number, name in enumerate(names):
        plan = _plan(name)
        for rank, result in enumerate(results):
            passes = lower(plan, 0, rank, "in step" if stage == 3 else "idle")
            backwards = [one for one in passes if one.kind == "backward"]
            # A backward runs the layers once more, unless it has just been replayed (ZeRO 3: if all have).
            mixed = stage == 3 and any(plan.micro_batches[i].slices for i in plan.kept)
            replayed = [one for one in backwards if one.graph in _not_recomputed(passes)]
            again = recompute * (len(backwards) - (0 if mixed else len(replayed)))
            assert result["layers"][number] == len(passes) - len(backwards) + again, name


def _not_recomputed(passes):
    """The graphs of replays and of dummies."""
    return {
        one.graph
        for one in passes
        if one.kind == "recompute_forward" or (one.kind == "forward" and not one.micro_batch.slices)
    }


@pytest.mark.slow
def test_backwards_in_a_row_release_what_they_gathered(on_ranks):
    for counted, uncounted in on_ranks(2, "tenant_jobs.gathered_while_backward_ends", tenants=False):
        assert len(counted) == 16
        assert max(counted) <= counted[0] < 10
        assert uncounted[0] < 10 < min(uncounted[1:])


def test_a_model_without_layer_numbers_runs_no_slices():
    model = _model("llama")
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    with pytest.raises(EvenloadError, match="no layer_idx"):
        _run(model, _plan("slices"), tokens())
    _run(model, _plan("packs"), tokens())
