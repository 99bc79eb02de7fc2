"""The sizes of the model that a recipe asks for: from its own fields or a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import shorten
from ..input import reading
from ..input.bounds import SIZE, whole_number
from ..machine.shape import ExpertShape, Shape
from .sections import Model

BYTE_VOCABULARY = 256
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Of a value in each precision (``train.dtype``)."""


def shape_of(model: Model) -> Shape:
    """The sizes a recipe asks for. Raises EvenloadError for a config.json that lacks one."""
    if model.config is not None:
        return shape_in(_fields_of(model.config))
    query_size, kv_size = (model.head_size * heads for heads in (model.num_attention_heads, model.kv_heads))
    of_head = model.vocab_size or BYTE_VOCABULARY, model.kind.gated
    shape = Shape(model.num_layers, model.hidden_size, model.ffn_size, query_size, kv_size, *of_head)
    experts = _experts_of(model) if model.moe else None
    return shape._replace(experts=experts, tied=model.tied_embeddings, heads=model.num_attention_heads)


def shape_in(fields: Mapping[str, Any]) -> Shape:
    """The sizes of a config.json. Raises EvenloadError where it lacks one."""
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
        _experts_in(fields),
        bool(fields.get("tie_word_embeddings")),
        heads,
    )


NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Where a config.json of Mixtral, Qwen, DeepSeek or their like says how many experts a layer has."""


def _experts_in(fields: Mapping[str, Any]) -> ExpertShape | None:
    """What experts a config.json names; None: dense."""
    key = next((key for key in NUM_EXPERTS if fields.get(key)), None)
    if key is None:
        return None
    sparse = tuple(layer for layer in range(_size(fields, "num_hidden_layers")) if _has_experts(fields, layer))
    if not sparse:
        return None
    ffn = _size(fields, "moe_intermediate_size" if fields.get("moe_intermediate_size") else "intermediate_size")
    shared = _size(fields, "shared_expert_intermediate_size", ffn * int(fields.get("n_shared_experts") or 0))
    return ExpertShape(_size(fields, key), _size(fields, "num_experts_per_tok", 1), ffn, shared, sparse)


def _has_experts(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer, from 0, of a config.json with experts has any."""
    if kinds := fields.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < (fields.get("first_k_dense_replace") or 0) or layer in (fields.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (fields.get("decoder_sparse_step") or 1) == 0


def _experts_of(model: Model) -> ExpertShape:
    assert model.moe
    shared = model.moe.shared_ffn_hidden_size
    return ExpertShape(model.moe.num_experts, model.moe.topk, model.expert_ffn_size, shared, model.moe_layers)


_DO = (
    "give a Hugging Face config.json with hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and "
    "vocab_size"
)


def _fields_of(path: Path) -> dict[str, Any]:
    name = f"model.config {shorten(str(path))}"
    return reading.mapping(reading.read_json(path, name, _DO), name, _DO)


def _size(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of a config.json; ``default`` where it is left out, null or 0. Raises EvenloadError."""
    value = fields.get(key)
    return default if default is not None and not value else whole_number(value, f"{key} of model.config", SIZE, do=_DO)
