"""Causal attention inside each sequence of a pack and nowhere else.

Shape legend: T = slots of the pack, N = tokens of some of its segments, H = query heads, G = key/value heads (H is a
multiple of G), D = head dimension.

Segments of whole sequences go through the kernels of `kernels`. Those of sequences that are cut attend to their prefix
in the pack's store as well, by the block pairs of `blocks`, as if ranks shared them and there were one (`sharing`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import KernelCall, choose_kernel
from .pack import Pack, SegmentRun
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
        return _attend(q_THD, k_TGD, v_TGD, runs[0], layer, scale)
    # split, not a slice per span: see `kernels`.
    parts = [torch.split(x, [span.size for span in spans]) for x in (q_THD, k_TGD, v_TGD)]
    outs = [q_THD.new_zeros(()).expand(span.size, *q_THD.shape[1:]) for span in spans]
    for number, run in enumerate(runs):
        places = [place for place, span in enumerate(spans) if span.run == number]
        q, k, v = (joined([part[i] for i in places]) for part in parts)
        out_NHD = _attend(q, k, v, run, layer, scale)
        for place, out in zip(places, torch.split(out_NHD, [spans[i].size for i in places]), strict=True):
            outs[place] = out
    return torch.cat(outs)


def _attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, run: SegmentRun, layer: int, scale: float) -> Tensor:
    if run.cut:
        return shared_attention(q_NHD, k_NGD, v_NGD, run.cut, layer, scale)
    call = KernelCall(q_NHD, k_NGD, v_NGD, run.cu_seqlens, run.segments, max(run.lengths), scale)
    return choose_kernel(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1]).run(call)
