"""The config of Transformers' model that a recipe describes, which is what a folder of its weights is written with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ....core.errors import EvenloadError, nearest, shorten, shown
from ....core.input import reading
from ....core.recipe.pretrained import LLAMA3
from ....core.recipe.recipe import Recipe
from ....core.recipe.sections import Model
from .reading import CONFIG

_FAMILIES: dict[str, str] = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}


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
    shape: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": recipe.data.max_length,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    rope = _rope(model)
    if model.family == "gpt":
        if model.kv_heads != model.num_attention_heads:
            raise EvenloadError(
                "the family gpt has no grouped queries on DeepSpeed",
                f"{model.kv_heads} query groups, {model.num_attention_heads} heads",
                "leave model.num_query_groups out, or use llama, qwen2 or qwen3",
            )
        # Megatron's GPT block: rotary over the whole head, MLP after attention and not beside it.
        epsilon = {} if model.norm_epsilon is None else {"layer_norm_eps": model.norm_epsilon}
        return transformers.GPTNeoXConfig(
            **shape, **epsilon, use_parallel_residual=False, rope_parameters={**rope, "partial_rotary_factor": 1.0}
        )
    kind = getattr(transformers, _FAMILIES[model.family])
    if model.norm_epsilon is not None:
        shape["rms_norm_eps"] = model.norm_epsilon
    shape |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "rope_parameters": rope}
    return kind(**{**shape, **_experts(model)})


def _rope(model: Model) -> dict[str, Any]:
    """The settings of rotary positions, as a config of Transformers has them."""
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
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
    if model.family == "mixtral":
        return {**fields, "intermediate_size": model.expert_ffn_size}
    dense = sorted(set(range(model.num_layers)) - set(model.moe_layers))
    # Scores over the sum of the chosen ones are the softmax over these alone.
    return {**fields, "moe_intermediate_size": model.expert_ffn_size, "mlp_only_layers": dense, "norm_topk_prob": True}


def _read(path: Path) -> Any:
    name, do = f"the model config {shorten(str(path))}", "give a Hugging Face config.json"
    fields = reading.mapping(reading.read_json(path, name, do), name, do)
    kind = fields.get("model_type")
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not isinstance(kind, str) or kind not in known:
        raise EvenloadError(
            f"{name} is no causal language model", f"model_type {shown(kind)}", nearest(str(kind), known)
        )
    try:
        return transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # each model checks its fields in a way of its own
        raise EvenloadError(
            f"{name} is refused by transformers", shorten(f"{type(error).__name__}: {error}"), do
        ) from error
