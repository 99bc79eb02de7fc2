"""The attention function ``evenload`` for Hugging Face models: a segment of a pack sees its own sequence alone.

Shape legend: T = slots of the pack, H = query heads, G = key/value heads, D = head dimension.

The pack is an argument of the model's call, ``model(input_ids=..., evenload_pack=pack)``. Transformers hands unknown
keyword arguments down to the attention function and binds them when a layer is checkpointed, so a replay runs under the
pack of its own forward; nothing global could be stale by then. The pack carries the keys and values of earlier slices,
which are kept by the module's ``layer_idx``. The function is not registered for masks: Transformers then builds none,
and an attention over packed documents needs none.

Windows, soft caps and sinks are arguments of the attention too, in every family of Transformers that has them.

Reaches every model whose attention goes through ``ALL_ATTENTION_FUNCTIONS`` with keyword arguments passed on (Llama,
Qwen2, Qwen3, Mistral and GPT-NeoX were tried). Models with their own attention code are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from ...core.errors import EvenloadError
from ...runtime.attention.attention import packed_attention
from ...runtime.attention.pack import Pack
from .models import rotary_reach

NAME = "evenload"
"""What ``attn_implementation`` calls it."""

PACK = "evenload_pack"
"""The keyword argument of the model's call that carries the pack."""

_UNSUPPORTED = ("position_bias", "head_mask")
"""Arguments by which some models change the scores; ignoring one would change the mathematics."""


def register() -> None:
    """Make ``attn_implementation="evenload"`` known to Transformers; doing it twice changes nothing."""
    AttentionInterface.register(NAME, attention)


def unregister() -> None:
    """Take the name out again; a model that is still set to it can no longer run."""
    AttentionInterface._global_mapping.pop(NAME, None)


def attention_of(model: Any) -> str:
    """The name of the implementation by which a model's text attends."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def set_attention(model: Any, name: str) -> str:
    """Have a model's text attend by the implementation of this name, and everything else, such as a tower of pictures,
    as it did; the name of what the text attended by."""
    text, stock = model.config.get_text_config(), attention_of(model)
    parts = getattr(model.config, "sub_configs", None) or {}
    own = next((key for key in parts if getattr(model.config, key, None) is text), None)
    model.set_attn_implementation(name if own is None else {own: name})
    return stock


def attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    evenload_pack: Pack | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over one pack.

    Returns:
        out_1THD, and no attention weights.

    Raises:
        EvenloadError: no pack was given, the row is not the pack's, or the model asks for something else than plain
            causal attention in windows, with soft caps and sinks (a mask, dropout, other scores).
    """
    if evenload_pack is None:
        raise EvenloadError(
            "a model set to the attention 'evenload' was called without a pack",
            f"attention module {type(module).__name__}, no {PACK}",
            f"call model(..., {PACK}=pack), or model.set_attn_implementation('sdpa') for batches that are not planned",
        )
    batch, _, num_padded_tokens, head_dim = query_1HTD.shape
    _refuse(module, attention_mask, evenload_pack, others)
    if batch != 1 or num_padded_tokens != evenload_pack.num_padded_tokens or key_1GTD.shape[2] != num_padded_tokens:
        raise EvenloadError(
            "the tokens of the call are not those of its pack",
            f"queries {tuple(query_1HTD.shape)}, {key_1GTD.shape[2]} keys, "
            f"a pack of {evenload_pack.num_padded_tokens} slots",
            "give input_ids [1, slots] of the same pack, and use_cache=False",
        )
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    layer, scale = getattr(module, "layer_idx", None) or 0, float(head_dim**-0.5 if scaling is None else scaling)
    out_THD = packed_attention(
        q_THD,
        k_TGD,
        v_TGD,
        evenload_pack,
        layer,
        scale,
        window=tokens_before(others),
        softcap=others.get("softcap"),
        sinks_H=others.get("s_aux"),
    )
    return out_THD.contiguous()[None], None  # some models take views of it


def tokens_before(arguments: Mapping[str, Any]) -> int | None:
    """Tokens before its own that a query sees, by the arguments of an attention; None: all."""
    window = arguments.get("sliding_window")
    return None if window is None else int(window) - 1


def _refuse(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    pack: Pack,
    others: dict[str, Any],
) -> None:
    """Raise EvenloadError for what packed causal attention cannot honour."""
    dropout = others.get("dropout")
    detail, do = "", ""
    if attention_mask is not None:
        detail, do = f"an attention mask {tuple(attention_mask.shape)}", "leave attention_mask out: a pack needs none"
    elif dropout:
        detail, do = f"attention dropout {dropout}", "set attention_dropout to 0 in the model's config"
    elif (reach := rotary_reach(getattr(module, "config", None))) is not None and reach < (longest := _longest(pack)):
        detail = f"rotary tables that beyond {reach} tokens depend on the pack, a sequence of {longest}"
        do = "use shorter sequences, or take a model without dynamic or longrope tables"
    elif (pack.prefix or pack.cached) is not None and getattr(module, "layer_idx", None) is None:
        detail = f"{type(module).__name__} has no layer_idx, by which keys of earlier slices are kept"
        do = "plan whole sequences (packing.slices: off), or use a model that numbers its layers"
    elif not getattr(module, "is_causal", True):
        detail, do = f"{type(module).__name__} is not causal", "use a causal language model"
    else:
        extra = [name for name in _UNSUPPORTED if others.get(name) is not None]
        if extra:
            detail, do = f"{extra[0]} given by {type(module).__name__}", "use a model with causal attention"
    if detail:
        raise EvenloadError("the attention 'evenload' is causal attention inside each sequence", detail, do)


def _longest(pack: Pack) -> int:
    """Tokens that the last query of some sequence sees, its prefix included; the same on all ranks that share it."""
    pieces = pack.shared.micro_batch.slices if pack.shared else pack.slices
    return max([pack.longest, *(piece.stop for piece in pieces)])
