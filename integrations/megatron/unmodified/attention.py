"""Attention of a user's model on packs: what each layer does with its scores, and who computes them.

The core attention of Megatron-Core's local layer spec refuses packs, so packed attention takes them. Transformer
Engine's takes those of whole samples by itself, told where they begin; for a pack that holds parts of samples, or that
ranks share, packed attention stands in for its forward. The modules, their parameters and their hooks stay in place.
Every call finds its pack in the parameters that Megatron hands down, so a recomputed layer sees the pack of its own
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ....core.errors import EvenloadError, Rule, refuse_first
from ....runtime.attention.attention import packed_attention
from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ..model.attention import PackedCoreAttention, PlannedSeqParams
from ..model.rope import TokenRope

_KNOWN_ROPES = (rotary_pos_embedding.RotaryEmbedding, yarn_rotary_pos_embedding.YarnRotaryEmbedding, TokenRope)


class _Scores(NamedTuple):
    """What a layer does with its scores; the arguments of `packed_attention` behind the pack."""

    layer: int
    scale: float
    window: int | None
    dropout: float


def layers_with_attention(gpt: Any) -> list[Any]:
    """Megatron's attention modules of a model, each with its ``core_attention``."""
    return [module for module in gpt.modules() if hasattr(module, "core_attention")]


def attention(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """`DotProductAttention.forward`, which refuses packs; those of the session go to packed attention instead."""
    pack = _pack_of(args, kwargs)
    if pack is None:
        return wrapped(*args, **kwargs)
    # Megatron divides by the number of the layer before its matmul and multiplies behind it, for the sake of fp16.
    scale = core.softmax_scale * (core.layer_number if core.config.apply_query_key_layer_scaling else 1)
    dropout = core.attention_dropout.p if core.training else 0.0
    scores = _Scores(core.layer_number, scale, _before(core.scale_mask_softmax.window_size), dropout)
    if not dropout or core.config.sequence_parallel:
        return _attend(args, kwargs, pack, scores)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():  # as the stock forward draws: each tensor-parallel rank for its own heads
        return _attend(args, kwargs, pack, scores)


@contextmanager
def attending(gpt: Any) -> Iterator[None]:
    """Inside, Transformer Engine's attention in a model takes packs, and packs' rotary embeddings are those of single
    samples; afterwards all is as it was."""
    layers = layers_with_attention(gpt)
    with ExitStack() as undo:
        for layer in layers:
            if not isinstance(layer.core_attention, (DotProductAttention, PackedCoreAttention)):
                undo.enter_context(with_attributes(layer.core_attention, forward=_around(layer)))
        for config in {id(layer.config): layer.config for layer in layers}.values():
            undo.enter_context(with_attributes(config, **_without_fusions(config)))
        yield


def _around(layer: Any) -> Callable[..., Tensor]:
    """The forward of the layer's core attention, for packs."""
    stock = layer.core_attention.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        pack = _pack_of(args, kwargs)
        if pack is None:
            plain: Tensor = stock(*args, **kwargs)
            return plain
        if pack.shared or any(run.cut for run in pack.layout[0]):
            return _attend(args, kwargs, pack, _scores_of(layer))
        if len(args) > 6:
            args = (*args[:6], _whole(pack), *args[7:])
        else:
            kwargs = {**kwargs, "packed_seq_params": _whole(pack)}
        whole: Tensor = stock(*args, **kwargs)
        return whole

    return forward


def _attend(args: Any, kwargs: Any, pack: Pack, scores: _Scores) -> Tensor:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    layer, scale, window, dropout = scores
    q_THD, k_TGD, v_TGD = (named[name] for name in ("query", "key", "value"))
    return packed_attention(q_THD, k_TGD, v_TGD, pack, layer, scale, window=window, dropout=dropout).flatten(1)


def _pack_of(args: Any, kwargs: Any) -> Pack | None:
    params = kwargs.get("packed_seq_params", args[6] if len(args) > 6 else None)
    return params.pack if isinstance(params, PlannedSeqParams) else None


def _whole(pack: Pack) -> PackedSeqParams:
    """The samples of a pack as Transformer Engine reads them. Padding belongs to the last of them, behind all of its
    tokens, where the causal mask hides it."""
    borders, longest = pack.cu_seqlens_padded, max(end - first for first, end in pairwise(pack.segments))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _scores_of(layer: Any) -> _Scores:
    """What Transformer Engine's attention is built with, where it computes no dropout (`why_whole`)."""
    config, number = layer.config, layer.layer_number
    scale = getattr(layer, "softmax_scale", None) or config.softmax_scale or 1 / math.sqrt(config.kv_channels)
    windowed = is_layer_window_attention(*_window_settings(layer))
    return _Scores(number, scale, _before(config.window_size if windowed else None), 0.0)


def _window_settings(layer: Any) -> tuple[Any, Any, int]:
    return layer.config.window_size, layer.config.window_attn_skip_freq, layer.layer_number


def _before(window: Any) -> int | None:
    """Tokens before its own that a query sees in Megatron's (left, right); Transformer Engine's -1 are all."""
    return None if window is None or window[0] < 0 else int(window[0])


def _without_fusions(config: Any) -> dict[str, bool]:
    """Settings of a config whose fused rotary embeddings would rotate a pack otherwise than a single sample.

    For packs Megatron calls Transformer Engine's kernel without interleaving and without the factor of yarn, which it
    does observe for single samples, and its kernel for q, k and v at once takes no packs at all.
    """
    off = {}
    if getattr(config, "fused_single_qkv_rope", False):
        off["fused_single_qkv_rope"] = False
    if config.apply_rope_fusion and not config.multi_latent_attention:
        factor = yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config(config)
        if config.rotary_interleaved or factor != 1:
            off["apply_rope_fusion"] = False
    return off


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
            ("window_size", shares and is_layer_window_attention(*_window_settings(layer)) and config.window_size),
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
