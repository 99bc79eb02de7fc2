"""Attention of a user's model on packs: what each layer does with its scores, and who computes them.

The core attention of Megatron-Core's local layer spec refuses packs, so packed attention takes them. Transformer
Engine's takes those of whole samples by itself, told where they begin; for a pack that holds parts of samples, or that
ranks share, packed attention stands in for its forward. The modules, their parameters and their hooks stay in place.
Every call finds its pack in the parameters that Megatron hands down, so a recomputed layer sees the pack of its own
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from .....runtime.attention.attention import packed_attention
from .....runtime.attention.pack import Pack
from .....runtime.attributes import with_attributes
from ...model.attention import PackedCoreAttention, PlannedSeqParams
from ..refusals.layers import layers_with_attention, window_of


def attention(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """`DotProductAttention.forward`, which refuses packs; those of the session go to packed attention instead."""
    pack = _pack_of(args, kwargs)
    if pack is None:
        return wrapped(*args, **kwargs)
    # Megatron divides by the number of the layer before its matmul and multiplies after it, for the sake of fp16.
    scale = core.softmax_scale * (core.layer_number if core.config.apply_query_key_layer_scaling else 1)
    dropout = core.attention_dropout.p if core.training else 0.0
    # As the stock forward draws: each tensor-parallel rank for its own heads.
    apart = dropout and not core.config.sequence_parallel
    with get_cuda_rng_tracker().fork() if apart else nullcontext():
        return _attend(args, kwargs, pack, core.layer_number, scale, core.scale_mask_softmax.window_size, dropout)


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
    stock: Callable[..., Tensor] = layer.core_attention.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        pack = _pack_of(args, kwargs)
        if pack is None:
            return stock(*args, **kwargs)
        if pack.shared or any(run.cut for run in pack.layout[0]):
            return _attend(args, kwargs, pack, layer.layer_number, *_scale_and_window(layer))
        if len(args) > 6:
            args = (*args[:6], _whole(pack), *args[7:])
        else:
            kwargs = {**kwargs, "packed_seq_params": _whole(pack)}
        return stock(*args, **kwargs)

    return forward


def _attend(args: Any, kwargs: Any, pack: Pack, layer: int, scale: float, window: Any, dropout: float = 0.0) -> Tensor:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    q_THD, k_TGD, v_TGD = (named[name] for name in ("query", "key", "value"))
    # Tokens before its own that a query sees in Megatron's (left, right); Transformer Engine's -1 are all.
    before = None if window is None or window[0] < 0 else int(window[0])
    return packed_attention(q_THD, k_TGD, v_TGD, pack, layer, scale, window=before, dropout=dropout).flatten(1)


def _pack_of(args: Any, kwargs: Any) -> Pack | None:
    params = kwargs.get("packed_seq_params", args[6] if len(args) > 6 else None)
    return params.pack if isinstance(params, PlannedSeqParams) else None


def _whole(pack: Pack) -> PackedSeqParams:
    """The samples of a pack as Transformer Engine reads them. Padding belongs to the last of them, after all of its
    tokens, where the causal mask hides it."""
    borders, longest = pack.cu_seqlens_padded, max(end - first for first, end in pairwise(pack.segments))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _scale_and_window(layer: Any) -> tuple[float, Any]:
    """What Transformer Engine's attention is built with, where it computes no dropout (`why_whole`)."""
    config = layer.config
    scale = getattr(layer, "softmax_scale", None) or config.softmax_scale or 1 / math.sqrt(config.kv_channels)
    return scale, window_of(layer)


def _without_fusions(config: Any) -> dict[str, bool]:
    """Settings of a config whose fused rotary embeddings would rotate a pack otherwise than a single sample. For packs
    Megatron calls Transformer Engine's kernel without interleaving and without the factor of yarn, which it does
    observe for single samples, and its kernel for q, k and v at once takes no packs at all."""
    off = {}
    if getattr(config, "fused_single_qkv_rope", False):
        off["fused_single_qkv_rope"] = False
    if config.apply_rope_fusion and not config.multi_latent_attention:
        factor = yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config(config)
        if config.rotary_interleaved or factor != 1:
            off["apply_rope_fusion"] = False
    return off
