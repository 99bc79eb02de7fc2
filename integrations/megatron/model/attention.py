"""Core attention of a Megatron-Core layer that runs a planned pack.

The plan of a micro-batch travels with it, as a field on Megatron's own `PackedSeqParams`. Megatron hands that object to
the core attention untouched, and the closures of activation recomputation keep it, so a replayed forward sees the plan
of its own micro-batch. There is no global "current batch", and no other part of the layer is replaced.

Shape legend: T = slots of the pack, H = query heads and G = key/value heads of this tensor-parallel rank,
D = head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ....core.errors import EvenloadError, refuse_first
from ....runtime.attention.attention import packed_attention
from ....runtime.attention.copy_rows import sent
from ....runtime.attention.pack import Pack
from ....runtime.experts.routing import StepRouting
from ..base.compat import submodules_of_experts
from .experts import PlannedRouter
from .norms import dividing_tokens

_SHARED_BY_MESH = "set it to 1; the mesh plugin shares sequences between ranks"


@dataclass
class PlannedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence parameters plus the pack that they belong to. Make them with `seq_params`."""

    pack: Pack | None = None
    routing: StepRouting | None = None
    """What routers know of the step; only asked for where there are experts."""


def seq_params(
    pack: Pack,
    borders: Tensor | None = None,
    longest: int = 0,
    *,
    routing: StepRouting | None = None,
    fused: bool = False,
) -> PlannedSeqParams:
    """Parameters for the whole pack as *one* Megatron document, or for documents with these borders.

    Else the borders between documents stay in the pack. Megatron reads ``cu_seqlens`` only to apply rotary embeddings,
    and those are gathered per token here (see `rope`), so one document gives the same angles in each of its branches.
    Its borders lie on the CPU, where Megatron turns them into Python numbers: no device has to be waited for; where
    ``fused``, on the device of the pack, for kernels read them.
    """
    if borders is None:
        borders = torch.tensor([0, pack.num_padded_tokens], dtype=torch.int32)
        borders = sent(borders, pack.positions_T.device) if fused else borders
        longest = pack.num_padded_tokens
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pack=pack,
        routing=routing,
    )


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Goes into the slot ``spec.submodules.self_attention.submodules.core_attention``.

    Raises EvenloadError when it is built for something it cannot honour: attention dropout, a sliding window, another
    mask than the causal one, cross or latent attention, scaled or sink softmax, static context parallelism.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_unsupported(config, attn_mask_type, attention_type, dropout)
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Causal attention inside each segment of the pack and to its prefix: [T, H * D]. The mask is never read."""
        pack = getattr(packed_seq_params, "pack", None)
        if pack is None or attention_bias is not None:
            raise EvenloadError(
                "a layer built with packed_layer_spec got a micro-batch without a plan"
                if pack is None
                else "packed attention has no attention bias",
                type(packed_seq_params).__name__,
                "pass packed_seq_params=seq_params(pack) to the model, or use forward_step, which does",
            )
        return packed_attention(q_THD, k_TGD, v_TGD, pack, self.layer_number, self.softmax_scale).flatten(1)


def packed_layer_spec(config: Any, stage: int | None = None) -> Any:
    """Megatron-Core's local layer spec for ``config`` with packed attention in its core-attention slot; with experts
    the spec of all layers of a stage (None: this rank's), with routers that know the pack."""
    spec = stock_layer_spec(config, stage)
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
        if (experts := submodules_of_experts(layer)) is not None:
            experts.router = PlannedRouter
    return dividing_tokens(spec, config, stage) if config.sequence_parallel else spec


def stock_layer_spec(config: Any, stage: int | None = None) -> Any:
    """Megatron-Core's local layer spec as it is; with experts that of all layers of a stage (None: this rank's)."""
    if config.num_moe_experts is not None:
        norm = config.normalization
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm, pp_rank=stage)
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)


def _refuse_unsupported(config: Any, mask: AttnMaskType, kind: str, dropout: float) -> None:
    rules = [
        (dropout > 0, "attention dropout", f"attention_dropout {dropout}", "set attention_dropout=0"),
        (kind != "self", "cross attention", f"attention_type {kind}", "use it for self-attention"),
        (mask != AttnMaskType.causal, "a mask that is not causal", f"attn_mask_type {mask}", "use causal"),
        (config.multi_latent_attention, "latent attention", "multi_latent_attention=True", "use plain attention"),
        (
            config.apply_query_key_layer_scaling,
            "query-key layer scaling",
            "apply_query_key_layer_scaling=True",
            "switch it off; it is an aid for fp16",
        ),
    ]
    settings = (
        ("window_size", None, "sliding-window attention", "set window_size=None"),
        ("softmax_type", "vanilla", "an attention sink", "set softmax_type='vanilla'"),
        ("context_parallel_size", 1, "Megatron's static context parallelism", _SHARED_BY_MESH),
    )
    for name, wanted, what, do in settings:
        value = getattr(config, name, wanted)
        rules.append((value != wanted, what, f"{name} {value}", do))
    refuse_first(*((broken, f"packed attention does not do {what}", detail, do) for broken, what, detail, do in rules))
