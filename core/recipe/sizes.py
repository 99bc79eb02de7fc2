"""The sizes of the model that a recipe asks for: from its own fields or a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import shorten
from ..input import reading
from ..input.bounds import SIZE, whole_number
from ..machine.shape import Experts, Shape
from .sections import Model

BYTE_VOCABULARY = 256
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Of a value in each precision (``train.dtype``)."""


def shape_of(model: Model) -> Shape:
    """The sizes a recipe asks for. Raises EvenloadError for a config.json that lacks one."""
    if model.config is None:
        query_size, kv_size = (model.head_size * heads for heads in (model.num_attention_heads, model.kv_heads))
        of_head = model.vocab_size or BYTE_VOCABULARY, model.kind.gated
        shape = Shape(model.num_layers, model.hidden_size, model.ffn_size, query_size, kv_size, *of_head)
        return shape._replace(experts=_experts_of(model) if model.moe else None, tied=model.tied_embeddings)
    fields = _fields_of(model.config)
    heads, hidden = _size(fields, "num_attention_heads"), _size(fields, "hidden_size")
    head = _size(fields, "head_dim", max(1, hidden // heads))
    return Shape(
        _size(fields, "num_hidden_layers"),
        hidden,
        _size(fields, "intermediate_size", fields.get("moe_intermediate_size") or None),
        head * heads,
        head * _size(fields, "num_key_value_heads", heads),
        _size(fields, "vocab_size"),
        fields.get("hidden_act", "silu") in ("silu", "swish"),
        experts_in(fields),
        bool(fields.get("tie_word_embeddings")),
    )


NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Where a config.json of Mixtral, Qwen, DeepSeek or their like says how many experts a layer has."""


def experts_in(fields: dict[str, Any]) -> Experts | None:
    """The experts that a config.json describes; None: the model is dense."""
    key = next((key for key in NUM_EXPERTS if fields.get(key)), None)
    if key is None:
        return None
    layers = range(_size(fields, "num_hidden_layers"))
    if not (sparse := [layer for layer in layers if _has_experts(fields, layer)]):
        return None
    ffn = _size(fields, "moe_intermediate_size" if fields.get("moe_intermediate_size") else "intermediate_size")
    shared = _size(fields, "shared_expert_intermediate_size", ffn * int(fields.get("n_shared_experts") or 0))
    return Experts(_size(fields, key), _size(fields, "num_experts_per_tok", 1), ffn, shared, len(sparse))


def moe_layers_of(model: Model) -> tuple[int, ...]:
    """Numbers of the layers that have experts, from 0. Raises EvenloadError for a config.json that lacks a size."""
    if model.config is None:
        return model.moe_layers
    fields = _fields_of(model.config)
    return tuple(layer for layer in range(_size(fields, "num_hidden_layers")) if _has_experts(fields, layer))


def _has_experts(fields: dict[str, Any], layer: int) -> bool:
    if kinds := fields.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < (fields.get("first_k_dense_replace") or 0) or layer in (fields.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (fields.get("decoder_sparse_step") or 1) == 0


def _experts_of(model: Model) -> Experts:
    assert model.moe
    shared = model.moe.shared_ffn_hidden_size
    return Experts(model.moe.num_experts, model.moe.topk, model.expert_ffn_size, shared, len(model.moe_layers))


def heads_of(model: Model) -> int:
    """Query heads. Raises EvenloadError for a config.json that does not say."""
    if model.config is None:
        return model.num_attention_heads
    return _size(_fields_of(model.config), "num_attention_heads")


_DO = (
    "give a Hugging Face config.json with hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and "
    "vocab_size"
)


def _fields_of(path: Path) -> dict[str, Any]:
    name = f"model.config {shorten(str(path))}"
    return reading.mapping(reading.read_json(path, name, _DO), name, _DO)


def _size(fields: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size of a config.json; ``default`` where it is left out, null or 0. Raises EvenloadError."""
    value = fields.get(key)
    return default if default is not None and not value else whole_number(value, f"{key} of model.config", SIZE, do=_DO)
