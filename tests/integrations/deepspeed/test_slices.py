"""Slices, replays and regrouped backward passes: without an engine in float64, then on real DeepSpeed engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deepspeed_tests.slice_plans import EQUAL, HAND, plan_of
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
from harness.cases import only_full
from harness.proof import LENGTHS, labels_in_turn, tokens

ODD = (30, 1, 64, 2, 17, 1)
"""Lengths, of which some have no target."""


def _model(family, plain=False):
    groups = {} if family == "gpt" else {"num_query_groups": 2}
    model = {"family": family, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    recipe = recipes.parse({"trainer": "deepspeed", "model": {**model, **groups}, "data": {"max_length": 64}})
    return build_model(recipe, **({"attn_implementation": "sdpa"} if plain else {})).double()


def _run(model, plan, tokens_of, *, labels=None, equal=False):
    """Loss and gradients of a plan on a bare model: the passes of one rank after those of the other."""
    model.zero_grad(set_to_none=True)
    total, divisor = 0.0, loss_divisor(plan.lengths, labels)
    for rank in range(plan.limits.num_ranks):
        store, losses = PrefixStore.ofplan_of(plan), {}
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


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt", "qwen2", "qwen3"])
def test_every_plan_is_exact_in_float64(family, recompute):
    model, plain = _model(family), _model(family, plain=True)
    if recompute:
        recompute_layers(model)
    names = ("packs", "packs, padded", "packs, idle", "slices, half replayed", "regrouped", "3")
    names += ("slices", "slices, all replayed", "0", "2", "7") if family == "llama" else ()
    for number, name in enumerate(names):
        lengths = ODD if name.isdigit() else LENGTHS
        plan, data, labels = plan_of(name, lengths), tokens(lengths), labels_in_turn(number, lengths)
        loss, wanted = plain_gradients(plain, data, plan.lengths, labels)
        found_loss, found = _run(model, plan, data, labels=labels, equal=recompute)
        assert found_loss == pytest.approx(loss, rel=1e-12), name
        assert relative_error(found, wanted) < 1e-9, name


def test_plain_training_takes_labels_as_transformers_does():
    model, data, labels = _model("llama", plain=True), tokens(), labels_in_turn(1)
    loss, gradients = plain_gradients(model, data, np.array(LENGTHS), labels)
    model.zero_grad()
    total = 0.0
    for i in np.flatnonzero(labels.targets):
        batch = {"input_ids": torch.tensor(data(i))[None], "labels": torch.tensor(labels.of(i))[None]}
        own = model(**batch, num_items_in_batch=labels.targets.sum()).loss
        own.backward()
        total += float(own.detach())
    # Transformers takes logits to float32 for a loss.
    assert loss == pytest.approx(total, rel=1e-6)
    assert relative_error(gradients, {name: p.grad for name, p in model.named_parameters()}) < 1e-6


def test_a_replay_needs_no_more_than_its_prefix():
    """Of micro-batches without gradients only slices that a replay reads and does not write run."""
    for name, stops in (("slices, all replayed", (60, 32)), ("regrouped", (64, 41))):
        for rank, sequence in enumerate((1, 4)):
            ran = lower(plan_of(name), 0, rank, "idle")
            pieces = [s for one in ran if one.kind == "forward_kv" for s in one.micro_batch.slices]
            assert {s.sequence for s in pieces} == {sequence}
            # Regrouped, no forward slice starts where the backward does: all of the sequence runs.
            assert max(s.stop for s in pieces) == stops[rank], name


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
def test_gradients_are_those_of_plain_training(exactness, stage, recompute, names):
    """Under ZeRO 3 nothing stays gathered, before it nothing is; and layers run no more often than passes need."""
    results = exactness(2, stage=stage, names=list(names), recompute=recompute)
    for rank, result in enumerate(results):
        assert result["gathered"] == 0
        for name, layers in zip(names, result["layers"], strict=True):
            assert layers == _layers_needed(plan_of(name), rank, stage, recompute), name


def _layers_needed(plan, rank, stage, recompute):
    """How often a rank runs each layer. A backward runs it once more where layers are recomputed, unless it has just
    been replayed (ZeRO 3: if all have)."""
    passes = lower(plan, 0, rank, "in step" if stage == 3 else "idle")
    backwards = [one for one in passes if one.kind == "backward"]
    mixed = stage == 3 and any(plan.micro_batches[i].slices for i in plan.kept)
    replayed = [one for one in backwards if one.graph in _not_recomputed(passes)]
    again = recompute * (len(backwards) - (0 if mixed else len(replayed)))
    return len(passes) - len(backwards) + again


def _not_recomputed(passes):
    """The graphs of replays and of dummies."""
    return {
        one.graph
        for one in passes
        if one.kind == "recompute_forward" or (one.kind == "forward" and not one.micro_batch.slices)
    }


def test_a_model_without_layer_numbers_runs_no_slices():
    model = _model("llama")
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    with pytest.raises(EvenloadError, match="no layer_idx"):
        _run(model, plan_of("slices"), tokens())
    _run(model, plan_of("packs"), tokens())
