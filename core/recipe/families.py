"""Families of models: one row says what a family computes, how its config.json puts it and what its tensors are called.

`FAMILIES` holds them by the names that recipes use; whoever adds a row to it adds a family. Trainers with models of
their own build them by these facts, folders are read and written by these names, and nobody else knows a family.

`#` stands for the number of a layer, of the whole model from 0, and `@` for that of an expert. A part with several
modules has their rows one after the other, ``qkv`` of each query group; with one, as that module has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_GATED = {"hidden_act": ("silu", "silu"), "attention_dropout": (0.0, 0.0), "quantization_config": (None, None)}
_LLAMA = {**_GATED, "attention_bias": (False, False), "mlp_bias": (False, False)}
_WITHOUT_WINDOW = {"use_sliding_window": (False, False)}
_LAYER = "model.layers.#."
_ATTENTION = {
    "embedding": "model.embed_tokens",
    "attention_norm": f"{_LAYER}input_layernorm",
    "qkv": " ".join(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
    "attention_output": f"{_LAYER}self_attn.o_proj",
    "ffn_norm": f"{_LAYER}post_attention_layernorm",
    "final_norm": "model.norm",
    "output": "lm_head",
}
_QK_NORM = {"q_norm": f"{_LAYER}self_attn.q_norm", "k_norm": f"{_LAYER}self_attn.k_norm"}
_FFN = {"ffn_in": f"{_LAYER}mlp.gate_proj {_LAYER}mlp.up_proj", "ffn_out": f"{_LAYER}mlp.down_proj"}


class Family(NamedTuple):
    """A family; what is left out is as in llama. Rotary positions over whole heads are common to all."""

    model_type: str
    """By which Transformers knows its config and its model."""
    gated: bool = True
    """RMSNorm, SwiGLU and no biases; else LayerNorm, GELU and biases."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Literal["none", "all", "some"] = "none"
    """Which layers have any."""
    keys: Mapping[str, str] = _KEYS
    """Names in config.json of the fields of ``model``; a field that is left out is not to be chosen."""
    expert_size_key: str = "moe_intermediate_size"
    epsilon: float = 1e-6
    """What an absent key of ``norm_epsilon`` means; so the next three of theirs."""
    rotary_base: float = 1e4
    rotary_share: float = 1.0
    head_dim: int | None = None
    fixed: Mapping[str, tuple[Any, Any]] = _LLAMA
    """What is computed, by key: what an absent key means, and the only value that our fields can say."""
    modules: Mapping[str, str] = _ATTENTION | _FFN
    """Transformers' names of each part."""
    biases: Collection[str] = ()
    """Parts that have one next to their weight."""

    def tensors(self, part: str, kind: str) -> tuple[str, ...]:
        """Names of the weight or bias of a part, as `modules` has them; none where the family has no such tensor."""
        if kind != "weight" and (kind, part) not in {("bias", biased) for biased in self.biases}:
            return ()
        return tuple(f"{module}.{kind}" for module in self.modules.get(part, "").split())


_NEOX = {
    "attention_norm": "gpt_neox.layers.#.input_layernorm",
    "qkv": "gpt_neox.layers.#.attention.query_key_value",
    "attention_output": "gpt_neox.layers.#.attention.dense",
    "ffn_norm": "gpt_neox.layers.#.post_attention_layernorm",
    "ffn_in": "gpt_neox.layers.#.mlp.dense_h_to_4h",
    "ffn_out": "gpt_neox.layers.#.mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
}
_EXPERTS = f"{_LAYER}block_sparse_moe.experts.@."

FAMILIES = {
    "llama": Family("llama"),
    "gpt": Family(
        "gpt_neox",
        gated=False,
        keys={key: name for key, name in _KEYS.items() if key not in ("num_query_groups", "head_dim")}
        | {"norm_epsilon": "layer_norm_eps"},
        epsilon=1e-5,
        rotary_share=0.25,
        fixed={
            "hidden_act": ("gelu", "gelu"),
            "attention_bias": (True, True),
            "attention_dropout": (0.0, 0.0),
            "hidden_dropout": (0.0, 0.0),
            "use_parallel_residual": (True, False),
            "quantization_config": (None, None),
        },
        modules={"embedding": "gpt_neox.embed_in", **_NEOX, "output": "embed_out"},
        biases=tuple(_NEOX),
    ),
    "qwen2": Family("qwen2", qkv_bias=True, fixed=_GATED | _WITHOUT_WINDOW, biases=("qkv",)),
    "qwen3": Family(
        "qwen3", qk_norm=True, head_dim=128, fixed=_LLAMA | _WITHOUT_WINDOW, modules=_ATTENTION | _QK_NORM | _FFN
    ),
    "mixtral": Family(
        "mixtral",
        experts="all",
        expert_size_key="intermediate_size",
        epsilon=1e-5,
        rotary_base=1e6,
        fixed=_GATED | {"sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)},
        modules={
            **_ATTENTION,
            "router": f"{_LAYER}block_sparse_moe.gate",
            "expert_in": f"{_EXPERTS}w1 {_EXPERTS}w3",
            "expert_out": f"{_EXPERTS}w2",
        },
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        qk_norm=True,
        experts="some",
        fixed=_LLAMA | _WITHOUT_WINDOW | {"norm_topk_prob": (False, True)},
        modules={
            **_ATTENTION,
            **_QK_NORM,
            **_FFN,
            "router": f"{_LAYER}mlp.gate",
            "expert_in": f"{_LAYER}mlp.experts.@.gate_proj {_LAYER}mlp.experts.@.up_proj",
            "expert_out": f"{_LAYER}mlp.experts.@.down_proj",
        },
    ),
}


def families_with(holds: Callable[[Family], bool]) -> list[str]:
    """Names of the families of which something holds, in the order of `FAMILIES`."""
    return [name for name, family in FAMILIES.items() if holds(family)]
