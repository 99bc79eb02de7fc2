"""Causal attention inside each sequence of a pack and nowhere else.

Shape legend: T = slots of the pack, N = tokens of some of its segments, H = query heads, G = key/value heads (H is a
multiple of G), D = head dimension.

Segments of whole sequences go through the kernels of `kernels`. Those of sequences that are cut attend to their prefix
in the pack's store as well, by the block pairs of `blocks`, as if ranks shared them and there were one (`sharing`).

Values of another width than queries and keys (multi-head latent attention) are taken as well: the narrower ones are
filled up with zeros, which change neither scores nor sums, so that every kernel, store and exchange knows one width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.errors import EvenloadError
from .kernels import KernelCall, choose_kernel
from .pack import Pack, SegmentRun
from .sharing.attention import shared_attention
from .sharing.running_job import joined
from .sharing.shared import Shared


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pack: Pack,
    layer: int,
    scale: float,
    *,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T) v over the earlier tokens of the same sequence; differentiable.

    Args:
        q_THD, k_TGD, v_TGD: queries, keys and values of the pack; a query head h reads key/value head h // (H / G).
            D of the values may be another.
        layer: any number that no other layer of this pipeline stage has.
        scale: of the scores, usually D ** -0.5.
        window: how many tokens before its own a query sees, also across the border of two slices; None: all.
        dropout: the probability with which an attention weight is set to 0, for samples that are neither cut nor
            shared.

    Returns:
        out_THD, as wide as the values; 0 where padding is left alone.

    Raises:
        EvenloadError: a slice lacks its prefix, or runs in an order in which its gradients would be wrong.
    """
    scores = _Scores(layer, scale, window, dropout)
    width, wide = v_TGD.shape[-1], max(v_TGD.shape[-1], q_THD.shape[-1])
    if width == q_THD.shape[-1]:
        return _packed(q_THD, k_TGD, v_TGD, pack, scores)
    q_THD, k_TGD, v_TGD = (pad(x, (0, wide - x.shape[-1])) for x in (q_THD, k_TGD, v_TGD))
    return _packed(q_THD, k_TGD, v_TGD, pack, scores)[..., :width]


class _Scores(NamedTuple):
    layer: int
    scale: float
    window: int | None
    dropout: float


def _packed(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, scores: _Scores) -> Tensor:
    if pack.shared:
        return _shared(q_THD, k_TGD, v_TGD, pack.shared, scores)
    runs, spans = pack.layout
    if len(spans) == 1:
        return _attend(q_THD, k_TGD, v_TGD, runs[0], scores)
    # split, not a slice per span: see `kernels`.
    parts = [torch.split(x, [span.size for span in spans]) for x in (q_THD, k_TGD, v_TGD)]
    outs = [q_THD.new_zeros(()).expand(span.size, *q_THD.shape[1:]) for span in spans]
    for number, run in enumerate(runs):
        places = [place for place, span in enumerate(spans) if span.run == number]
        q, k, v = (joined([part[i] for i in places]) for part in parts)
        out_NHD = _attend(q, k, v, run, scores)
        for place, out in zip(places, torch.split(out_NHD, [spans[i].size for i in places]), strict=True):
            outs[place] = out
    return torch.cat(outs)


def _attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, run: SegmentRun, scores: _Scores) -> Tensor:
    if run.cut:
        return _shared(q_NHD, k_NGD, v_NGD, run.cut, scores)
    longest, window = max(run.lengths), scores.window
    if window is not None and window >= longest - 1:
        window = None
    call = KernelCall(q_NHD, k_NGD, v_NGD, run.cu_seqlens, run.segments, longest, scores.scale, window, scores.dropout)
    options = frozenset({"window"} if window is not None else ()) | ({"dropout"} if scores.dropout else set())
    return choose_kernel(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1], options).run(call)


def _shared(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, shared: Shared, scores: _Scores) -> Tensor:
    if scores.dropout:
        raise EvenloadError(
            "attention dropout cannot be drawn where samples are cut or shared",
            f"dropout {scores.dropout:g} in layer {scores.layer}",
            "set attention_dropout=0, or keep samples whole (plugins.packing.slices=off, plugins.mesh off)",
        )
    return shared_attention(q_NHD, k_NGD, v_NGD, shared, scores.layer, scores.scale, scores.window)
