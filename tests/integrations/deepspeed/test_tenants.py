"""Tenants on real DeepSpeed engines: each as if it were alone with the base, under every stage of ZeRO."""

from __future__ import annotations

import pytest
import torch
from deepspeed_tests import other_trainer
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.runtime.stage.offload import layers_of
from harness.cases import full, only_full
from harness.lazy import LazyModule
from harness.proof import ROUNDING
from harness.world import World

engine = LazyModule("evenload.integrations.deepspeed.engine.model")
tenant_layers = LazyModule("evenload.integrations.deepspeed.tenants")

HAND = ("slices", "slices, half replayed", "regrouped")
EQUAL = ("slices, in step, half replayed", "slices, in step, all replayed", "regrouped")


def _layer(**options):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97, **options}
    model = engine.build_model(recipes.parse({"trainer": "deepspeed", "model": model, "data": {"max_length": 64}}))
    return model, layers_of(model)


@pytest.mark.parametrize(("family", "attention"), [("llama", "self_attn"), ("gpt", "attention")])
def test_every_linear_layer_of_the_decoder_is_adapted(family, attention):
    model, layers = _layer(family=family)
    blocks = tenant_layers.blocks_of(layers, tenant_layers.linear_names(model))
    places = [place for block in blocks for site in block.sites for place in site.places]
    matrices = {n: tuple(p.shape) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    assert {f"{place.name}.weight": (place.outputs, place.inputs) for place in places} == matrices
    assert [block.carrier for block in blocks] == [getattr(layer, attention) for layer in layers]


def test_layers_that_recompute_a_part_of_themselves_are_refused():
    model, layers = _layer()
    names = tenant_layers.linear_names(model)
    layers[1].mlp.part = type(layers[0])(model.config, 0)
    with pytest.raises(EvenloadError, match=r"LlamaDecoderLayer\.mlp\.part recomputes itself"):
        tenant_layers.blocks_of(layers, names)
    del layers[1].mlp.part, layers[1].self_attn
    with pytest.raises(EvenloadError, match="do not know which tenants run"):
        tenant_layers.blocks_of(layers, names)


@pytest.mark.parametrize("marked", [False, True])
def test_a_backward_begins_with_its_replay_whoever_asks_first(marked):
    """What adapters add behind the last linear layer asks for activations before that layer's own backward does."""
    model, layers = _layer()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(tenant_layers.need_gradient)
    engine.recompute_layers(model)
    if marked:
        tenant_layers.replay_first(layers)
    model.set_attn_implementation("sdpa")
    events = []
    layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: events.append("forward"))
    layers[1].mlp.down_proj.register_full_backward_pre_hook(lambda *_: events.append("backward"))
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert events == (["forward", "forward", "backward"] if marked else ["forward", "backward", "forward"])


def _exact(results, rounding=ROUNDING, loss=ROUNDING):
    for result in results:
        assert result["moved"] == []
        assert result["gathered"] == 0
        for found in result["found"]:
            assert found["loss"] <= loss, found
            assert max(found["grad"], found["norm"]) <= rounding, found
            assert not found["missing"], found
            assert not found["failed"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"stage": 0}, ["packs", "slices, half replayed"]),
        only_full({"stage": 3, "recompute": True}, ["packs", "5"]),
        only_full({"stage": 1, "pp": 2}, ["packs", "2"]),
    ],
)
def test_bf16_within_its_rounding(on_ranks, asked, names):
    _exact(on_ranks(2, "tenant_jobs.exactness", dtype="bf16", names=names, **asked), 3e-2, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"stage": 0}, ("packs", *HAND[1:], "8")),
        only_full({"stage": 0}, (*HAND, "0", "1", "2", "3")),
        only_full({"stage": 1, "recompute": True}, (*HAND[1:], "5")),
        only_full({"stage": 2}, ("4", "5", "6", "7")),
        only_full({"stage": 3}, (*EQUAL, "slices, in step", "2", "5", "8")),
        ({"stage": 3, "recompute": True}, (EQUAL[0], "5", "14")),
        only_full({"stage": 3, "recompute": True}, (*EQUAL[1:], "8")),
        only_full({"stage": 3, "recompute": True, "family": "gpt"}, ("slices, half replayed",)),
    ],
)
def test_gradients_are_those_of_each_tenant_alone(on_ranks, asked, names):
    _exact(on_ranks(2, "tenant_jobs.exactness", names=names, **asked))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("tenants", [(0, 1, 2, 0, 1, 2, 2, 0), (0,) * 8], ids=["in company", "alone"])
@pytest.mark.parametrize("asked", [*({"stage": stage} for stage in range(4)), {"stage": 1, "pp": 2}])
def test_weights_that_add_up_to_0_train_by_the_divisor_of_their_tenant(on_ranks, asked, tenants):
    _exact(on_ranks(2, "tenant_jobs.exactness", names=["packs", "5"], tenants=tenants, drawings=20, **asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        only_full({"stage": 0}, ("slices, half replayed", "2", "8"), id="zero0"),
        pytest.param({"stage": 2, "recompute": True}, ("slices, half replayed", "2", "8"), id="zero2"),
        pytest.param({"stage": 3, "recompute": True}, ("packs, idle", "packs", "5"), id="zero3"),
        only_full({"stage": 1, "pp": 2}, ("2", "pipeline 3", "recomputed 16"), id="stages"),
    ],
)
def test_adapters_after_three_steps_are_those_of_each_tenant_alone(on_ranks, asked, names):
    for said in on_ranks(2, "tenant_jobs.three_steps", names=list(names), **asked):
        assert said["kept"]
        assert said["moved"] == []
        assert said["steps"] == [3, 2, 3]
        assert max(said[error] for error in ("loss", "norm", "score", "logits")) <= ROUNDING
        assert max(said[error] for error in ("weights", "first", "second")) <= 1e-3  # of how far they moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        (1, False, ["zones, all_to_all", "chain, half replayed"]),
        only_full(3, True, ["shared 5"]),
        only_full(1, False, ["ring", "growth", "shared 3"]),
        only_full(3, True, ["ring, in step", "zones, all_to_all", "chain, half replayed", "shared 3"]),
    ],
)
def test_ranks_share_micro_batches_of_tenants(on_ranks, stage, recompute, names):
    _exact(on_ranks(4, "tenant_jobs.exactness", stage=stage, names=names, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "recompute", "names"),
    [
        only_full(2, False, ("packs", "0", "1", "2", "3", "pipeline 5")),
        only_full(2, True, ("packs", "2", "recomputed 16")),
        (4, False, ("packs", "shared 3", "pipeline 3")),
    ],
)
def test_pipelines_train_each_tenant_as_if_alone(on_ranks, size, recompute, names):
    _exact(on_ranks(size, "tenant_jobs.exactness", stage=1, names=list(names), pp=2, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"trainer": "megatron", "parallel": {"tp": 2}}, {"trainer": "deepspeed", "deepspeed": {"zero_stage": 3}}),
        only_full({"trainer": "deepspeed", "parallel": {"pp": 2}}, {"trainer": "megatron"}),
    ],
)
def test_a_tenant_goes_on_under_the_other_trainer(forge, tmp_path, first, then):
    other_trainer.wrote_folder(tmp_path / "base")
    losses = []
    for asked in (
        {**first, "steps": 4, "write": str(tmp_path / "half")},
        {**then, "steps": 2, "read": str(tmp_path / "half")},
    ):
        folder = tmp_path / asked["trainer"]
        folder.mkdir()
        of_trainer = World(forge(asked["trainer"]), 2, folder)
        losses.append(of_trainer.run(other_trainer.call, {"folder": str(tmp_path / "base"), **asked})[0])
        of_trainer.close()
    whole, resumed = losses
    assert resumed == [pytest.approx(of_step, rel=ROUNDING) for of_step in whole[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("tenants", [False, True])
def test_backwards_in_a_row_release_the_weights_that_they_gathered_frozen_ones_too(on_ranks, tenants):
    for counted, uncounted in on_ranks(2, "tenant_jobs.gathered_while_backward_ends", tenants=tenants):
        assert len(counted) == 16
        assert max(counted) <= counted[0] < 10
        assert uncounted[0] < 10 < min(uncounted[1:])


@pytest.mark.slow
@full
def test_a_replay_keeps_the_frozen_weights_of_one_layer_for_its_backward(on_ranks):
    asked = {"tenants": True, "recompute": True, "ways": [True]}
    for (counted,) in on_ranks(2, "tenant_jobs.gathered_while_backward_ends", **asked):
        assert max(counted) <= 9
