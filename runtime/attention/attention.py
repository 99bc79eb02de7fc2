"""Causal attention inside each sequence of a pack and nowhere else.

Shape legend: T = slots of the pack, N = tokens of some of its segments, H = query heads, G = key/value heads (H is a
multiple of G), D = head dimension.

Segments of whole sequences go through the kernels of `kernels`. Those of sequences that are cut attend to their prefix
in the pack's store as well, by the block pairs of `blocks` in one autograd node: it keeps q, out and the log-sum-exp of
each query, and reads keys and values from the store again in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.plan.step_plan import Slice
from .blocks import BlockKernel, Inputs, choose_block
from .kernels import KernelCall, choose_kernel
from .pack import Pack, SegmentRun
from .prefix import PrefixStore
from .sharing.attention import shared_attention
from .sharing.running_job import joined


def packed_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, layer: int, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the earlier tokens of the same sequence; differentiable.

    Args:
        q_THD, k_TGD, v_TGD: queries, keys and values of the pack; a query head h reads key/value head h // (H / G).
        layer: any number that no other layer of this pipeline stage has.
        scale: of the scores, usually D ** -0.5.

    Returns:
        out_THD; 0 where padding is left alone.

    Raises:
        EvenloadError: a slice lacks its prefix, or runs in an order in which its gradients would be wrong.
    """
    if pack.shared:
        return shared_attention(q_THD, k_TGD, v_TGD, pack.shared, layer, scale)
    runs, spans = pack.layout
    if len(spans) == 1:
        return _attend(q_THD, k_TGD, v_TGD, runs[0], pack.prefix, layer, scale)
    # split, not a slice per span: see `kernels`.
    parts = [torch.split(x, [span.size for span in spans]) for x in (q_THD, k_TGD, v_TGD)]
    outs = [q_THD.new_zeros(()).expand(span.size, *q_THD.shape[1:]) for span in spans]
    for number, run in enumerate(runs):
        places = [place for place, span in enumerate(spans) if span.run == number]
        q, k, v = (joined([part[i] for i in places]) for part in parts)
        out_NHD = _attend(q, k, v, run, pack.prefix, layer, scale)
        for place, out in zip(places, torch.split(out_NHD, [spans[i].size for i in places]), strict=True):
            outs[place] = out
    return torch.cat(outs)


def _attend(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, run: SegmentRun, store: PrefixStore | None, layer: int, scale: float
) -> Tensor:
    if not run.pieces:
        call = KernelCall(q_NHD, k_NGD, v_NGD, run.cu_seqlens, run.segments, max(run.lengths), scale)
        return choose_kernel(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1]).run(call)
    assert store is not None
    frozen = torch.is_grad_enabled() and not any(x.requires_grad for x in (q_NHD, k_NGD, v_NGD))
    block = choose_block(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1])
    cut = _Cut(store, layer, run.pieces, run.lengths, scale, block, frozen)
    out: Tensor = _CutAttention.apply(q_NHD, k_NGD, v_NGD, cut)  # type: ignore[no-untyped-call]
    return out


class _Cut(NamedTuple):
    """What the autograd node needs beside its tensors."""

    store: PrefixStore
    layer: int
    pieces: tuple[Slice, ...]
    lengths: tuple[int, ...]
    scale: float
    block: BlockKernel
    frozen: bool


class _CutAttention(torch.autograd.Function):
    """Attention of slices over their prefixes and themselves."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, cut: _Cut) -> Tensor:
        rows = [torch.split(x, list(cut.lengths)) for x in (q_NHD, k_NGD, v_NGD)]
        done = []
        for piece, q, k, v in zip(cut.pieces, *rows, strict=True):
            keys, values = cut.store.write(cut.layer, piece, k, v, frozen=cut.frozen)
            done.append(cut.block.forward(Inputs(q, keys, values, True, cut.scale)))
        outs, lses = zip(*done, strict=True)
        out_NHD = joined(outs)
        ctx.cut = cut
        ctx.save_for_backward(q_NHD, out_NHD, *lses)
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NHD, out_NHD, *lses = ctx.saved_tensors
        cut: _Cut = ctx.cut
        rows = [torch.split(x, list(cut.lengths)) for x in (q_NHD, out_NHD, dout_NHD.contiguous())]
        grads = []
        for piece, lse, q, out, dout in zip(cut.pieces, lses, *rows, strict=True):
            keys, values = cut.store.read(cut.layer, piece)
            dq, *dkv = cut.block.backward(dout, Inputs(q, keys, values, True, cut.scale), out, lse)
            dk, dv = cut.store.settle(cut.layer, piece, *dkv)
            grads.append((dq, dk.to(keys.dtype), dv.to(values.dtype)))
        dq, dk, dv = (torch.cat(row) for row in zip(*grads, strict=True))
        return dq, dk, dv, None
