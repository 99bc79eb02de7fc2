"""Causal attention inside each segment of a pack and nowhere else.

Shape legend: T = slots of the pack, N = slots of some segments, H = query heads, G = key/value heads (H is a multiple
of G), D = head dimension.

Segments of whole sequences go through the kernels of `kernels`. Those of sequences that are cut attend to their prefix
in the pack's store as well, by the block pairs of `blocks` in one autograd node: it keeps q, out and the log-sum-exp of
each query, and reads keys and values from the store again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import EvenloadError
from ..core.workload import Slice
from .blocks import Block, Inputs, choose_block
from .kernels import Call, Kernel, choose_kernel
from .pack import Pack
from .prefix import PrefixStore


def packed_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, layer: int, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the earlier tokens of the same sequence; differentiable.

    Args:
        q_THD, k_TGD, v_TGD: queries, keys and values of the pack; a query head h reads key/value head h // (H / G).
        layer: any number that no other layer of this pipeline stage has.
        scale: of the scores, usually D ** -0.5.

    Returns:
        out_THD.

    Raises:
        EvenloadError: a slice lacks its prefix, or runs in an order in which its gradients would be wrong.
    """
    runs = list(_runs(pack))
    if len(runs) == 1:
        return _attend(q_THD, k_TGD, v_TGD, pack, runs[0], layer, scale)
    lengths = [run.segments[-1] for run in runs]
    parts = zip(*(torch.split(x, lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
    out = [_attend(q, k, v, pack, run, layer, scale) for run, (q, k, v) in zip(runs, parts, strict=True)]
    return torch.cat(out)


class _Run(NamedTuple):
    """Neighbouring segments of one kind."""

    first: int
    """Slot of the pack at which they start."""
    segments: tuple[int, ...]
    """Borders, from 0."""
    pieces: tuple[Slice, ...]
    """Of sequences that are cut; empty: whole sequences."""


def _runs(pack: Pack) -> Iterator[_Run]:
    store = pack.prefix
    cut = [store is not None and piece.sequence in store for piece in pack.slices] or [False]
    for piece, is_cut in zip(pack.slices, cut, strict=False):
        if piece.start and not is_cut:
            raise EvenloadError(
                "a slice has no prefix to attend to",
                f"tokens {piece.start} to {piece.stop} of sequence {piece.sequence}",
                "give build_pack the PrefixStore of the plan",
            )
    at = 0
    for is_cut, group in groupby(cut):
        count = len(list(group))
        borders = pack.segments[at : at + count + 1]
        pieces = pack.slices[at : at + count] if is_cut else ()
        yield _Run(borders[0], tuple(b - borders[0] for b in borders), pieces)
        at += count


def _attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack, run: _Run, layer: int, scale: float) -> Tensor:
    if not run.pieces:
        borders = pack.cu_seqlens
        if len(run.segments) < len(borders):
            borders = torch.tensor(run.segments, dtype=torch.int32, device=q.device)
        longest = max(b - a for a, b in pairwise(run.segments))
        return packed_causal_attention(q, k, v, borders, longest, scale, segments=run.segments)
    assert pack.prefix is not None
    frozen = torch.is_grad_enabled() and not any(x.requires_grad for x in (q, k, v))
    cut = _Cut(pack.prefix, layer, run, scale, choose_block(q.device, q.dtype, q.shape[-1]), frozen)
    out: Tensor = _CutAttention.apply(q, k, v, cut)  # type: ignore[no-untyped-call]
    return out


class _Cut(NamedTuple):
    """What the autograd node needs beside its tensors."""

    store: PrefixStore
    layer: int
    run: _Run
    scale: float
    block: Block
    frozen: bool


class _CutAttention(torch.autograd.Function):
    """Attention of slices over their prefixes and themselves."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, cut: _Cut) -> Tensor:
        out_NHD = torch.zeros_like(q_NHD, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q_NHD.dtype, torch.float32)
        lse_HN = torch.zeros(q_NHD.shape[1], len(q_NHD), dtype=wide, device=q_NHD.device)
        for piece, first in zip(cut.run.pieces, cut.run.segments, strict=False):
            end = first + piece.length
            cut.store.write(cut.layer, piece, k_NGD[first:end], v_NGD[first:end], cut.frozen)
            keys, values = cut.store.read(cut.layer, piece)
            out, lse = cut.block.forward(Inputs(q_NHD[first:end], keys, values, True, cut.scale))
            out_NHD[first:end] = out
            lse_HN[:, first:end] = lse
        ctx.cut = cut
        ctx.save_for_backward(q_NHD, out_NHD, lse_HN)
        return out_NHD

    @staticmethod
    def backward(ctx: Any, dout_NHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_NHD, out_NHD, lse_HN = ctx.saved_tensors
        cut: _Cut = ctx.cut
        dq_NHD = torch.zeros_like(out_NHD)
        dk_NGD: Tensor | None = None
        dv_NGD: Tensor | None = None
        for piece, first in reversed(list(zip(cut.run.pieces, cut.run.segments, strict=False))):
            at = slice(first, first + piece.length)
            keys, values = cut.store.begin_backward(cut.layer, piece)
            x = Inputs(q_NHD[at], keys, values, True, cut.scale)
            dq_NHD[at], dk, dv = cut.block.backward(dout_NHD[at], x, out_NHD[at], lse_HN[:, at])
            dk, dv = cut.store.book(cut.layer, piece, dk, dv)
            if dk_NGD is None or dv_NGD is None:
                dk_NGD, dv_NGD = (y.new_zeros(len(q_NHD), *y.shape[1:]) for y in (dk, dv))
            dk_NGD[at], dv_NGD[at] = dk, dv
        assert dk_NGD is not None
        assert dv_NGD is not None
        return dq_NHD, dk_NGD, dv_NGD, None


def packed_causal_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    kernel: Kernel | None = None,
    segments: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v over the earlier tokens of the same segment; differentiable.

    Args:
        q_THD, k_TGD, v_TGD: packed queries, keys and values; a query head h reads key/value head h // (H / G).
        cu_seqlens: int32 [S + 1], borders of the segments, on the device of q.
        max_seqlen: slots of the longest segment.
        scale: of the scores, usually D ** -0.5.
        kernel: a row of `kernels.KERNELS`; None takes `choose_kernel`'s answer.
        segments: `cu_seqlens` as Python integers (`Pack.segments`); spares the CPU path and fallback a device sync.

    Returns:
        out_THD.
    """
    kernel = kernel or choose_kernel(q_THD.device, q_THD.dtype, q_THD.shape[-1])
    return kernel.run(Call(q_THD, k_TGD, v_TGD, cu_seqlens, segments, max_seqlen, scale))
