"""Attention of a user's model: which of it packs may take, whole samples or parts of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from .....core.errors import EvenloadError, Rule, refuse_first
from ...model.attention import PackedCoreAttention
from ...model.rope import TokenRope

_KNOWN_ROPES = (rotary_pos_embedding.RotaryEmbedding, yarn_rotary_pos_embedding.YarnRotaryEmbedding, TokenRope)


def layers_with_attention(gpt: Any) -> list[Any]:
    """Megatron's attention modules of a model, each with its ``core_attention``."""
    return [module for module in gpt.modules() if hasattr(module, "core_attention")]


def window_settings(layer: Any) -> tuple[Any, Any, int]:
    """What Megatron asks to know whether a layer attends in a window: its size, how often, the layer's number."""
    return layer.config.window_size, layer.config.window_attn_skip_freq, layer.layer_number


def rope_owners(gpt: Any) -> list[Any]:
    """The model, and layers with latent attention: what has a ``rotary_pos_emb`` of its own."""
    owners = [gpt, *layers_with_attention(gpt)]
    return [owner for owner in owners if getattr(owner, "rotary_pos_emb", None) is not None]


def why_whole(gpt: Any, *, shares: bool) -> str:
    """What keeps samples of a GPTModel whole, each on one rank; empty where its packs may hold parts of samples.
    ``shares``: a plugin may share samples between ranks.

    Rotary embeddings, if it has some, must give their angles by position, and packed attention, which reads the prefix
    of a part, must do what the layers' own does. No layer may read the tokens behind a part.
    """
    known = [type(owner.rotary_pos_emb) for owner in rope_owners(gpt)]
    odd = {f"{rope.__name__} knows borders between samples alone" for rope in known if rope not in _KNOWN_ROPES}
    if gpt.config.mtp_num_layers:
        odd.add("multi-token prediction reads the tokens behind a part of a sample")
    for layer in layers_with_attention(gpt):
        config, core = layer.config, layer.core_attention
        dropout = core.attention_dropout.p if isinstance(core, DotProductAttention) else config.attention_dropout
        settings = (
            ("attention_dropout", dropout),
            ("softmax_type", config.softmax_type if config.softmax_type != "vanilla" else None),
            ("qk_clip", getattr(config, "qk_clip", False)),
            ("log_max_attention_logit", getattr(config, "log_max_attention_logit", False)),
            ("window_size", shares and is_layer_window_attention(*window_settings(layer)) and config.window_size),
            ("fp8_dot_product_attention", getattr(config, "fp8_dot_product_attention", False)),
            ("fp8_multi_head_attention", getattr(config, "fp8_multi_head_attention", False)),
        )
        if not isinstance(core, PackedCoreAttention):
            odd |= {f"{name} {value} is known to whole samples alone" for name, value in settings if value}
    return ", ".join(sorted(odd))


def refuse_attention(gpt: Any) -> None:
    """Raise EvenloadError for attention of a model that cannot keep packed samples apart as it treats single ones."""
    layers = layers_with_attention(gpt)
    unknown = sorted({type(o.core_attention).__name__ for o in layers if not isinstance(o.core_attention, _known())})
    if unknown:
        raise EvenloadError(
            "a layer's core attention is not known to keep packed samples apart",
            ", ".join(unknown),
            "use Megatron-Core's local or Transformer Engine layer spec, or disable evenload's plugins",
        )
    for layer in layers:
        if not isinstance(layer.core_attention, PackedCoreAttention):
            refuse_first(*rules_of_layer(layer, isinstance(layer.core_attention, DotProductAttention)))


def rules_of_layer(layer: Any, local: bool) -> Iterable[Rule]:
    """What a layer's configuration may not ask for; ``local``: its core attention is Megatron's own."""
    config, kind, mask = layer.config, layer.attention_type, layer.attn_mask_type
    do = "change it, or disable evenload's plugins for this model"
    yield kind != "self", "packs know self-attention alone", f"attention_type {kind}", do
    yield mask != AttnMaskType.causal, "packs are causal inside each sample", f"attn_mask_type {mask}", do
    if local:
        window, sink = layer.core_attention.scale_mask_softmax.window_size, config.softmax_type
        yield sink != "vanilla", "packed attention has no sink", f"softmax_type {sink}", do
        odd = window is not None and (window[0] < 0 or window[1] != 0)
        yield odd, "Megatron's own attention knows windows of (tokens before, 0) alone", f"window_size {window}", do
    overlap = bool(getattr(config, "tp_comm_overlap", False))
    why = "Transformer Engine's buffers for overlapped tensor parallelism have one shape, and packs differ in length"
    yield overlap and not local, why, "tp_comm_overlap True", do


def _known() -> tuple[type, ...]:
    from megatron.core.extensions import transformer_engine

    # Without Transformer Engine the name is bound to a mock, which is no type.
    known = (DotProductAttention, PackedCoreAttention, getattr(transformer_engine, "TEDotProductAttention", None))
    return tuple(attention for attention in known if isinstance(attention, type))
