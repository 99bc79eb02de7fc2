"""The names that Megatron's parameters have in Hugging Face folders, by the parts of `core.recipe.families`.

Megatron's rows of a parameter are those of its tensors, first to last: one; gate, then up; for each query group its
queries, its key, its value. Its GPT block has queries, keys and values by head, as the tensor of GPT-NeoX has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ....core.recipe.families import FAMILIES

_NUMBERS = re.compile(r"(layers|local_experts)\.(\d+)\.")
_PARTS = {
    "embedding.word_embeddings": "embedding",
    "decoder.layers.#.input_layernorm": "attention_norm",
    "decoder.layers.#.self_attention.linear_qkv": "qkv",
    "decoder.layers.#.self_attention.q_layernorm": "q_norm",
    "decoder.layers.#.self_attention.k_layernorm": "k_norm",
    "decoder.layers.#.self_attention.linear_proj": "attention_output",
    "decoder.layers.#.pre_mlp_layernorm": "ffn_norm",
    "decoder.layers.#.mlp.linear_fc1": "ffn_in",
    "decoder.layers.#.mlp.linear_fc2": "ffn_out",
    "decoder.layers.#.mlp.router": "router",
    "decoder.layers.#.mlp.experts.local_experts.@.linear_fc1": "expert_in",
    "decoder.layers.#.mlp.experts.local_experts.@.linear_fc2": "expert_out",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "output",
}


def names_of(family: str, name: str) -> tuple[str, ...]:
    """The Hugging Face names of a Megatron parameter by its global name; none where the family has no such tensor."""
    numbers = dict(_NUMBERS.findall(name))
    pattern = _NUMBERS.sub(lambda match: f"{match[1]}.{'#' if match[1] == 'layers' else '@'}.", name)
    layer, expert = numbers.get("layers", ""), numbers.get("local_experts", "")
    module, _, kind = pattern.rpartition(".")
    tensors = FAMILIES[family].tensors(_PARTS.get(module, ""), kind)
    return tuple(theirs.replace("#", layer).replace("@", expert) for theirs in tensors)


def without_place(family: str, names: Iterable[str]) -> list[str]:
    """Hugging Face names that no parameter of the family has, sorted."""
    row = FAMILIES[family]
    tensors = {tensor for part in row.modules for kind in ("weight", "bias") for tensor in row.tensors(part, kind)}
    known = {re.sub("[#@]", "0", tensor) for tensor in tensors}
    return sorted(name for name in names if re.sub(r"\b\d+\b", "0", name) not in known)
