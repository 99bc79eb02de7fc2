"""Recipes that start from a Hugging Face folder: what is read from its config.json, and what is refused."""

import json
import re

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sizes import shape_of

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 103,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def folder(tmp_path, kind="llama", **config):
    fields = {"model_type": kind, **SIZES, **config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


def recipe(weights, trainer="megatron", **model):
    return parse({"trainer": trainer, "model": {"weights": weights, **model}})


def test_fields_are_those_of_the_folder(tmp_path):
    model = recipe(folder(tmp_path, tie_word_embeddings=True, rope_parameters=LLAMA3)).model
    assert (model.family, model.num_layers, model.hidden_size, model.kv_heads) == ("llama", 4, 64, 2)
    assert (model.ffn_size, model.vocab_size, model.tied_embeddings, model.head_size) == (96, 103, True, 16)
    assert (model.rotary_base, model.rope_scaling_factor, model.norm_epsilon, model.moe) == (5e5, 32.0, 1e-6, None)
    old = recipe(folder(tmp_path, rms_norm_eps=1e-5, rope_theta=1e6, rope_scaling=None)).model
    assert (old.norm_epsilon, old.rotary_base, old.rope_scaling_factor) == (1e-5, 1e6, None)


def test_a_recipe_that_is_changed_stays_the_same_model(tmp_path):
    before = recipe(folder(tmp_path, "qwen3_moe", num_experts=8, **EXPERTS), moe={"z_loss": 1e-3})
    assert before.changed({"train.steps": 3}).model == before.model
    assert before.model.moe
    assert (before.model.moe.num_experts, before.model.moe.topk, before.model.moe.z_loss) == (8, 2, 1e-3)


def test_layers_with_experts(tmp_path):
    some = folder(tmp_path, "qwen3_moe", num_experts=8, mlp_only_layers=[1, 3], **EXPERTS)
    assert recipe(some).model.moe_layers == (0, 2)
    every = folder(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert recipe(every).model.moe_layers == (0, 1, 2, 3)


def test_the_shape_knows_heads_of_their_own_size_and_tied_embeddings(tmp_path):
    untied, tied = (shape_of(recipe(folder(tmp_path, "qwen3", tie_word_embeddings=tie)).model) for tie in (False, True))
    assert (untied.query_size, untied.kv_size) == (4 * 128, 2 * 128)
    layers = 4 * (64 * 2 * (512 + 256) + 3 * 64 * 96)
    assert untied.parameters == layers + 2 * 64 * 103
    assert tied.parameters == layers + 64 * 103


CONTRADICTIONS = {
    "num_layers": 8,
    "family": "gpt",
    "tied_embeddings": True,
    "vocab_size": 128,
    "moe": {"num_experts": 4},
    "rope_scaling_factor": 8.0,
}


@pytest.mark.parametrize("field", CONTRADICTIONS)
def test_a_recipe_that_says_otherwise_is_refused_by_name(tmp_path, field):
    with pytest.raises(EvenloadError, match=rf"model\.{field} says otherwise") as refusal:
        recipe(folder(tmp_path), **{field: CONTRADICTIONS[field]})
    assert "by config.json" in refusal.value.found


def test_a_nested_field_that_says_otherwise_is_refused_by_name(tmp_path):
    weights = folder(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(EvenloadError, match=r"model\.moe\.topk says otherwise"):
        recipe(weights, moe={"topk": 1})


UNKNOWN = {
    "qwen": {"kind": "qwen"},
    "window": {"kind": "qwen2", "use_sliding_window": True},
    "layer_types": {"kind": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
    "attention_bias": {"attention_bias": True},
    "parallel residual": {"kind": "gpt_neox"},
    "rotary positions of 0.25": {"kind": "gpt_neox", "use_parallel_residual": False},
    "rope scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope scaling of llama 3": {"rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}},
    "experts in layers": {"kind": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2, **EXPERTS},
    "norm_topk_prob": {"kind": "qwen3_moe", "num_experts": 4, **EXPERTS, "norm_topk_prob": False},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_only_transformers_builds_runs_under_deepspeed(tmp_path, case):
    weights = folder(tmp_path, **UNKNOWN[case])
    with pytest.raises(EvenloadError, match="cannot be built with trainer megatron") as refusal:
        recipe(weights)
    assert "trainer: deepspeed" in refusal.value.do
    model = recipe(weights, "deepspeed").model
    assert model.config == tmp_path / "config.json"
    assert model.vocab_size == 103
    assert recipe(weights, "deepspeed").changed({"train.steps": 3}).model == model


def test_an_unknown_family_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(EvenloadError) as refusal:
        recipe(folder(tmp_path, "qwen33"))
    assert "did you mean 'qwen3'" in refusal.value.found


@pytest.mark.parametrize("trainer", ["megatron", "deepspeed"])
def test_a_folder_without_config(tmp_path, trainer):
    with pytest.raises(EvenloadError, match=re.escape("config.json of model.weights")):
        recipe(str(tmp_path), trainer)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(EvenloadError, match="is not an integer"):
        recipe(str(tmp_path), trainer)
