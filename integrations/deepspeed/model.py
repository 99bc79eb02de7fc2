"""A Hugging Face causal language model from a recipe: the shape is given, the weights come from the seed, nothing is
downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ...core.errors import EvenloadError, nearest, shorten, shown
from ...core.input import reading
from ...core.recipe.recipe import Recipe
from ...core.recipe.sections import Model
from ...runtime.attributes import with_attributes
from ...runtime.stage.lookup import sum_in_float32
from ..huggingface import attention
from .partial import Parts, build_partly

_FAMILIES: dict[str, str] = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}

_ALIGNED = 8
"""Values of bfloat16 in 16 bytes."""


def model_config(recipe: Recipe) -> Any:
    """The `PreTrainedConfig` that `recipe.model` describes, or the one of ``recipe.model.config``.

    Raises EvenloadError: the file is missing or no config of a causal language model; the vocabulary is not known; the
    family has no grouped queries.
    """
    model = recipe.model
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
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.family == "gpt":
        if model.kv_heads != model.num_attention_heads:
            raise EvenloadError(
                "the family gpt has no grouped queries on DeepSpeed",
                f"{model.kv_heads} query groups, {model.num_attention_heads} heads",
                "leave model.num_query_groups out, or use llama, qwen2 or qwen3",
            )
        # Megatron's GPT block: rotary over the whole head, MLP after attention and not beside it.
        return transformers.GPTNeoXConfig(
            **shape, use_parallel_residual=False, rope_parameters={**rope, "partial_rotary_factor": 1.0}
        )
    kind = getattr(transformers, _FAMILIES[model.family])
    head_dim = model.hidden_size // model.num_attention_heads
    return kind(
        **{**shape, **_experts(model)}, num_key_value_heads=model.kv_heads, head_dim=head_dim, rope_parameters=rope
    )


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


def build_model(
    recipe: Recipe,
    *,
    attn_implementation: str = attention.NAME,
    experts_implementation: str | None = None,
    parts: Parts | None = None,
) -> Any:
    """The model in float32 on the CPU, in training mode; equal on every rank that has the same recipe.

    Args:
        experts_implementation: how Transformers runs experts; None: one product over groups of tokens, whose sums have
            one order on every device, where it can (it wants rows of whole 16 bytes), else expert by expert.
        parts: what of it is wanted, if not the whole; see `partial`.

    Raises:
        EvenloadError: see `model_config`; or the model has its own attention code.
    """
    attention.register()
    kind, config = transformers.AutoModelForCausalLM, model_config(recipe)
    sizes = recipe.model.hidden_size, recipe.model.expert_ffn_size
    grouped = recipe.model.moe is None or not any(size % _ALIGNED for size in sizes)
    if experts_implementation or not grouped:
        config._experts_implementation = experts_implementation or "eager"
    whole = partial(kind.from_config, config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        model = build_partly(whole, parts) if parts else whole()
    sum_in_float32(model.get_input_embeddings())
    model.config.use_cache = False
    model.train()
    return model


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of the layers for the backward, which runs them again; Hugging Face's own means. Raises
    EvenloadError: the model has no such means."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise EvenloadError(
            f"the model '{model.config.model_type}' cannot recompute its activations",
            "train.recompute true",
            "set train.recompute to false, or use a model with gradient checkpointing",
        )
    # A reentrant checkpoint gives no gradients to a layer whose input needs none (a frozen embedding).
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@contextmanager
def recomputing(blocks: Sequence[Any], layers: int) -> Iterator[None]:
    """Forwards inside keep the inputs alone of the first ``layers`` decoder layers, and the activations of the others.

    `recompute_layers` must have been called. A layer asks in its forward; its backward does what that was told.
    """
    with ExitStack() as undo:
        for number, block in enumerate(blocks):
            undo.enter_context(with_attributes(block, gradient_checkpointing=number < layers))
        yield


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
