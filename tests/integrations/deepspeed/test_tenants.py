"""Tenants on real DeepSpeed engines: each as if it were alone with the base, under every stage of ZeRO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.model import build_model, recompute_layers
from evenload.integrations.deepspeed.tenants import blocks_of, linear_names, need_gradient, replay_first
from evenload.runtime.stage.offload import layers_of

ROUNDING = 2e-6
HAND = ("chains none", "chains some", "regrouped")
EQUAL = ("chains none equal", "chains some equal", "chains all equal", "regrouped")
RANDOM = tuple(f"random {seed}" for seed in range(8))
GPT = {"family": "gpt", "num_query_groups": 4}


def _layer(**options):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97, **options}
    model = build_model(recipes.parse({"trainer": "deepspeed", "model": model, "data": {"max_length": 64}}))
    return model, layers_of(model)


@pytest.mark.parametrize(("family", "attention"), [("llama", "self_attn"), ("gpt", "attention")])
def test_every_linear_layer_of_the_decoder_is_adapted(family, attention):
    model, layers = _layer(family=family)
    blocks = blocks_of(layers, linear_names(model))
    places = [place for block in blocks for site in block.sites for place in site.places]
    matrices = {n: tuple(p.shape) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    assert {f"{place.name}.weight": (place.outputs, place.inputs) for place in places} == matrices
    assert [block.carrier for block in blocks] == [getattr(layer, attention) for layer in layers]


def test_layers_that_recompute_a_part_of_themselves_are_refused():
    model, layers = _layer()
    names = linear_names(model)
    layers[1].mlp.part = type(layers[0])(model.config, 0)
    with pytest.raises(EvenloadError, match=r"LlamaDecoderLayer\.mlp\.part recomputes itself"):
        blocks_of(layers, names)
    del layers[1].mlp.part, layers[1].self_attn
    with pytest.raises(EvenloadError, match="do not know which tenants run"):
        blocks_of(layers, names)


@pytest.mark.parametrize("marked", [False, True])
def test_a_backward_begins_with_its_replay_whoever_asks_first(marked):
    """What adapters add behind the last linear layer asks for activations before that layer's own backward does."""
    model, layers = _layer()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(need_gradient)
    recompute_layers(model)
    if marked:
        replay_first(layers)
    model.set_attn_implementation("sdpa")
    events = []
    layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: events.append("forward"))
    layers[1].mlp.down_proj.register_full_backward_pre_hook(lambda *_: events.append("backward"))
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert events == (["forward", "forward", "backward"] if marked else ["forward", "backward", "forward"])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "more"), [(0, {}), (3, {"recompute": True}), (1, {"pp": 2})])
def test_bf16_within_its_rounding(on_ranks, stage, more):
    names = ["whole", "1"] if "pp" in more else ["whole_sequences", "chains some"]
    for result in on_ranks(2, "rank_tenants.exactness", stage=stage, names=names, dtype="bf16", **more):
        for name in names:
            assert result[name]["grad"] <= 3e-2, name
            assert result[name]["loss"] <= 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more", "names"),
    [
        (0, {}, (*HAND, *RANDOM[:4])),
        (1, {"recompute": True}, (*HAND, *RANDOM[4:8])),
        (2, {}, RANDOM[8:]),
        (3, {}, (*EQUAL, *RANDOM[:3])),
        (3, {"recompute": True}, (*EQUAL, *RANDOM[3:6])),
        (3, {"recompute": True, **GPT}, ("chains some", "random 7")),
    ],
)
def test_gradients_are_those_of_each_tenant_alone(on_ranks, stage, more, names):
    results = on_ranks(2, "rank_tenants.exactness", stage=stage, names=list(names), **more)
    for name in names:
        for result in results:
            assert result[name]["tenants"] >= 2, name
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name
            assert result[name]["gathered"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more", "names"),
    [
        (0, {}, ("chains some", "random 2", "random 1")),
        (2, {"recompute": True}, ("chains some", "random 2", "random 1")),
        (3, {"recompute": True}, ("chains some", "random 2", "random 1")),
        (1, {"pp": 2}, ("1", "2 W", "3 recompute")),
    ],
)
def test_adapters_after_three_steps_are_those_of_each_tenant_alone(on_ranks, stage, more, names):
    for told in on_ranks(2, "rank_tenants.trained", stage=stage, names=list(names), **more):
        assert told["absent"] == [True, True]
        assert told["base"]
        assert told["steps"] == [3, 2, 3]
        assert max(told[error] for error in ("loss", "norm", "score", "logits")) <= ROUNDING
        assert max(told["apart"]) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (3, True)])
def test_ranks_share_micro_batches_of_tenants(on_ranks, stage, recompute):
    names = ["mixed ring equal", "cp_groups all_to_all", "chains some", "random 3"]
    for result in on_ranks(4, "rank_tenants.exactness", stage=stage, names=names, recompute=recompute):
        for name in names:
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name
            assert result[name]["gathered"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "recompute", "names"),
    [
        (2, False, ("whole", *(str(seed) for seed in range(4)), "5 W")),
        (2, True, ("whole", "4", "6 recompute")),
        (4, False, ("whole", "1", "2 idle", "3 shared", "4 shared", "7 W")),
    ],
)
def test_pipelines_train_each_tenant_as_if_alone(on_ranks, size, recompute, names):
    results = on_ranks(size, "rank_tenants.exactness", stage=1, names=list(names), pp=2, recompute=recompute)
    for name in names:
        for result in results:
            assert result[name]["tenants"] == 3, name
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"trainer": "megatron", "parallel": {"tp": 2}}, {"trainer": "deepspeed", "deepspeed": {"zero_stage": 3}}),
        ({"trainer": "deepspeed", "parallel": {"pp": 2}}, {"trainer": "megatron"}),
    ],
)
def test_a_tenant_goes_on_under_the_other_trainer(world, forge, tmp_path, first, then):
    spec = importlib.util.spec_from_file_location("other_trainer", Path(__file__).with_name("rank_other_trainer.py"))
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    ranks.wrote_folder(tmp_path / "base")
    losses = []
    for asked in (
        {**first, "steps": 4, "write": str(tmp_path / "half")},
        {**then, "steps": 2, "read": str(tmp_path / "half")},
    ):
        folder = tmp_path / asked["trainer"]
        folder.mkdir()
        of_trainer = type(world(2))(forge(asked["trainer"]), 2, folder)
        losses.append(of_trainer.run(ranks.call, {"folder": str(tmp_path / "base"), **asked})[0])
        of_trainer.close()
    whole, resumed = losses
    assert resumed == [pytest.approx(of_step, rel=ROUNDING) for of_step in whole[2:]]


@pytest.mark.slow
def test_backwards_in_a_row_release_the_frozen_weights_that_they_gathered(on_ranks):
    for seen in on_ranks(2, "rank_tenants.gathered_while_backward_ends", counted=True, recompute=False):
        assert len(seen) == 16
        assert max(seen) <= seen[0] < 10
    for seen in on_ranks(2, "rank_tenants.gathered_while_backward_ends", counted=False, recompute=False):
        assert seen[0] < 10 < min(seen[1:])
    for seen in on_ranks(2, "rank_tenants.gathered_while_backward_ends", counted=True, recompute=True):
        assert max(seen) <= 9, "a replay keeps the weights of one layer for its backward"
