"""The config of Transformers' model that a recipe describes, which is what a folder of its weights is written with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ....core.errors import EvenloadError, nearest, shorten, shown
from ....core.input import reading
from ....core.recipe.families import families_with
from ....core.recipe.pretrained import LLAMA3
from ....core.recipe.recipe import Recipe
from ....core.recipe.sections import Model
from .reading import CONFIG


def model_config(recipe: Recipe) -> Any:
    """The `PreTrainedConfig` that `recipe.model` describes, or the one of ``recipe.model.config``.

    Raises EvenloadError: the file is missing or no config of a causal language model; the vocabulary is not known; the
    family has no grouped queries.
    """
    model = recipe.model
    if model.weights is not None:
        return _read(model.weights / CONFIG)
    if model.config is not None:
        return _read(model.config)
    if model.vocab_size is None:
        raise EvenloadError(
            "the size of the vocabulary is not known",
            "model.vocab_size is null",
            "resolve it from the tokenizer, or set model.vocab_size",
        )
    family = model.kind
    if "num_query_groups" not in family.keys and model.kv_heads != model.num_attention_heads:
        others = families_with(lambda one: one.experts == "none" and "num_query_groups" in one.keys)
        raise EvenloadError(
            f"the family {model.family} has no grouped queries on DeepSpeed",
            f"{model.kv_heads} query groups, {model.num_attention_heads} heads",
            f"leave model.num_query_groups out, or use {', '.join(others[:-1])} or {others[-1]}",
        )
    values = {key: getattr(model, _COMPUTED.get(field, field)) for field, key in family.keys.items()}
    fields = {
        **{key: value for key, value in values.items() if value is not None},
        **{key: built for key, (absent, built) in family.fixed.items() if built != absent},
        **_experts(model),
        "max_position_embeddings": recipe.data.max_length,
        "rope_parameters": _rope(model),
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.AutoConfig.for_model(family.model_type, **fields)


_COMPUTED = {"num_query_groups": "kv_heads", "head_dim": "head_size", "ffn_hidden_size": "ffn_size"}
"""Fields of ``model`` that a recipe may leave out, and their values."""


def _rope(model: Model) -> dict[str, Any]:
    """The settings of rotary positions, as a config of Transformers has them."""
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.kind.rotary_share != 1.0:
        rope["partial_rotary_factor"] = 1.0
    if model.rope_scaling_factor is None:
        return rope
    return {**rope, **LLAMA3, "factor": model.rope_scaling_factor}


def _experts(model: Model) -> dict[str, Any]:
    """The fields that a config of Transformers has for experts; none for a dense model."""
    if model.moe is None:
        return {}
    fields = {
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.topk,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }
    size = {model.kind.expert_size_key: model.expert_ffn_size}
    if model.kind.experts == "all":
        return fields | size
    dense = sorted(set(range(model.num_layers)) - set(model.moe_layers))
    return fields | size | {"mlp_only_layers": dense}


def _read(path: Path) -> Any:
    name, do = f"the model config {shorten(str(path))}", "give a Hugging Face config.json"
    fields = reading.mapping(reading.read_json(path, name, do), name, do)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or not _is_causal_model(kind):
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        raise EvenloadError(
            f"{name} is not a causal language model", f"model_type {shown(kind)}", nearest(str(kind), known)
        )
    try:
        return transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # each model checks its fields in a way of its own
        raise EvenloadError(
            f"{name} is refused by transformers", shorten(f"{type(error).__name__}: {error}"), do
        ) from error


def _is_causal_model(kind: str) -> bool:
    """Whether Transformers, or who registered a class with it, has a causal language model of that type."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return kind in known and known[kind] in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
