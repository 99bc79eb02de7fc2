"""Attention of a pack whose sequences are in a `KvCache`: long slices one by one, rows of a few tokens in one call.

Shape legend: T = tokens of the pack, N = tokens of a slice, M = tokens up to its end, B = rows of a call, Q = tokens of
the longest of these, H = query heads, D = head dimension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.plan.step_plan import Slice
from .blocks import Inputs, choose_block, with_sinks
from .by_block import attend_rows
from .decode_rows import DecodeRows
from .kernels import KernelRow, first_of, has, on_gpu
from .kv_cache import CachedRows, Pools
from .scores import ScoreForm

_PAGE = 256
"""What FlashAttention wants the tokens of a block to be a multiple of."""


class DecodeCall(NamedTuple):
    """The last queries of some sequences, each over the keys up to its own that the cache holds."""

    q_BQHD: Tensor
    pools: Pools
    rows: DecodeRows
    scores: ScoreForm


@dataclass(frozen=True)
class DecodeKernel(KernelRow):
    """One row of `DECODERS`, which runs rows of a few tokens."""

    run: Callable[[DecodeCall], Tensor]
    """Gives out_BQHD."""
    options: frozenset[str]
    """Of "window", "softcap" and "sinks", what it can do."""
    block_multiple: int = 1
    """What the tokens of a block are a multiple of."""


def cached_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows: CachedRows, layer: int, scores: ScoreForm
) -> Tensor:
    """`packed_attention` of a pack whose keys and values stay in a cache; not differentiable.

    Returns:
        out_THD; 0 of slots after the last slice.
    """
    pools = rows.cache.write(layer, rows, k_TGD, v_TGD)
    outs = []
    for piece, first in zip(rows.long, rows.borders, strict=False):
        outs.append(_slice(q_THD[first : first + piece.length], pools, rows, piece, scores))
    end = rows.borders[-1]
    for short in rows.short:
        first, end = end, end + short.num_tokens
        kernel = choose_decoder(
            q_THD.device, q_THD.dtype, q_THD.shape[-1], rows.cache.tables.block_tokens, scores.options
        )
        call = DecodeCall(short.filled(q_THD[first:end]), pools, short, scores)
        outs.append(short.taken(kernel.run(call)))
    if len(q_THD) > end:
        outs.append(q_THD.new_zeros(len(q_THD) - end, *q_THD.shape[1:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _slice(q_NHD: Tensor, pools: Pools, rows: CachedRows, piece: Slice, scores: ScoreForm) -> Tensor:
    """Attention of one slice over itself and what is kept before it."""
    blocks = rows.blocks_of(piece)
    k_MGD, v_MGD = (pool[blocks].flatten(0, 1)[: piece.stop] for pool in pools)
    block = choose_block(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1], scores.options & {"window", "softcap"})
    out_NHD, lse_HN = block.forward(Inputs(q_NHD, k_MGD, v_MGD, True, scores.scale, scores.window, scores.softcap))
    return out_NHD if scores.sinks_H is None else with_sinks(out_NHD, lse_HN, scores.sinks_H)[0]


def _flash_attn(call: DecodeCall) -> Tensor:
    function = importlib.import_module("flash_attn").flash_attn_with_kvcache
    window = (-1, -1) if call.scores.window is None else (call.scores.window, 0)
    blocks, lengths = call.rows.tables
    out_BQHD: Tensor = function(
        call.q_BQHD,
        *call.pools,
        cache_seqlens=lengths,
        block_table=blocks,
        softmax_scale=call.scores.scale,
        causal=True,
        window_size=window,
        softcap=call.scores.softcap or 0.0,
    )
    return out_BQHD


def _anywhere(*_: Any) -> bool:
    return True


DECODERS = (
    DecodeKernel(
        "flash_attn",
        lambda: has("flash_attn", "flash_attn_with_kvcache"),
        on_gpu,
        _flash_attn,
        frozenset({"window", "softcap"}),
        _PAGE,
    ),
    DecodeKernel(
        "torch",
        _anywhere,
        _anywhere,
        lambda call: attend_rows(*call),
        frozenset({"window", "softcap", "sinks"}),
    ),
)


def block_tokens_on(device: torch.device) -> int:
    """Tokens of a block that all kernels of a device take."""
    return _PAGE if device.type == "cuda" else 16


@cache
def choose_decoder(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_tokens: int, options: frozenset[str]
) -> DecodeKernel:
    """The first row of `DECODERS` that is there, takes these inputs and blocks, and can do what is asked for."""
    rows = (row for row in DECODERS if options <= row.options and not block_tokens % row.block_multiple)
    return first_of(rows, device, dtype, head_dim, "attention of rows of a few tokens")
