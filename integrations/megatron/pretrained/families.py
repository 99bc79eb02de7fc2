"""The names that Megatron's parameters have in Hugging Face folders, and how their rows lie; one table for both
directions.

    names   rows of the whole parameter, first to last
    one     those of the tensor
    two     gate, then up
    three   for each query group: its queries, its key, its value

`#` stands for the number of a layer, of the whole model from 0, and `@` for that of an expert. Megatron's GPT block
has queries, keys and values by head, as the tensor of GPT-NeoX has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = "decoder.layers.#."
_NUMBERS = re.compile(r"(layers|local_experts)\.(\d+)\.")

_ATTENTION = {
    f"{_LAYER}input_layernorm.weight": "input_layernorm.weight",
    f"{_LAYER}self_attention.linear_qkv.weight": " ".join(f"self_attn.{x}_proj.weight" for x in "qkv"),
    f"{_LAYER}self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    f"{_LAYER}pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_QKV_BIAS = {
    f"{_LAYER}self_attention.linear_qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"
}
_QK_NORM = {
    f"{_LAYER}self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    f"{_LAYER}self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_MLP = {
    f"{_LAYER}mlp.linear_fc1.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    f"{_LAYER}mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_EXPERT = f"{_LAYER}mlp.experts.local_experts.@."
_QWEN_EXPERTS = {
    f"{_LAYER}mlp.router.weight": "mlp.gate.weight",
    f"{_EXPERT}linear_fc1.weight": "mlp.experts.@.gate_proj.weight mlp.experts.@.up_proj.weight",
    f"{_EXPERT}linear_fc2.weight": "mlp.experts.@.down_proj.weight",
}
_MIXTRAL_EXPERTS = {
    f"{_LAYER}mlp.router.weight": "block_sparse_moe.gate.weight",
    f"{_EXPERT}linear_fc1.weight": "block_sparse_moe.experts.@.w1.weight block_sparse_moe.experts.@.w3.weight",
    f"{_EXPERT}linear_fc2.weight": "block_sparse_moe.experts.@.w2.weight",
}
_NEOX_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_NEOX_ENDS = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "decoder.final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
    "decoder.final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
    "output_layer.weight": "embed_out.weight",
}


def _table(ends: dict[str, str], prefix: str, *parts: dict[str, str]) -> dict[str, tuple[str, ...]]:
    layers = {ours: [prefix + name for name in theirs.split()] for part in parts for ours, theirs in part.items()}
    return {ours: tuple(theirs) for ours, theirs in {**layers, **{n: [t] for n, t in ends.items()}}.items()}


_IN_LAYERS = "model.layers.#."
_NEOX = {
    f"{_LAYER}{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in _NEOX_MODULES.items()
    for kind in ("weight", "bias")
}
FAMILIES = {
    "llama": _table(_ENDS, _IN_LAYERS, _ATTENTION, _MLP),
    "qwen2": _table(_ENDS, _IN_LAYERS, _ATTENTION, _QKV_BIAS, _MLP),
    "qwen3": _table(_ENDS, _IN_LAYERS, _ATTENTION, _QK_NORM, _MLP),
    "gpt": _table(_NEOX_ENDS, "gpt_neox.layers.#.", _NEOX),
    "mixtral": _table(_ENDS, _IN_LAYERS, _ATTENTION, _MIXTRAL_EXPERTS),
    "qwen3_moe": _table(_ENDS, _IN_LAYERS, _ATTENTION, _QK_NORM, _MLP, _QWEN_EXPERTS),
}


def names_of(family: str, name: str) -> tuple[str, ...]:
    """The Hugging Face names of a Megatron parameter by its global name; none where the family has no such tensor."""
    numbers = dict(_NUMBERS.findall(name))
    pattern = _NUMBERS.sub(lambda match: f"{match[1]}.{'#' if match[1] == 'layers' else '@'}.", name)
    layer, expert = numbers.get("layers", ""), numbers.get("local_experts", "")
    return tuple(theirs.replace("#", layer).replace("@", expert) for theirs in FAMILIES[family].get(pattern, ()))


def without_place(family: str, names: Iterable[str]) -> list[str]:
    """Those of the Hugging Face names that no parameter of the family has."""
    known = {re.sub("[#@]", "0", name) for names_of_one in FAMILIES[family].values() for name in names_of_one}
    return sorted(name for name in names if re.sub(r"\b\d+\b", "0", name) not in known)
