"""Causal attention inside each sequence of a pack and nowhere else.

Shape legend: T = slots of the pack, N = tokens of some of its segments, H = query heads, G = key/value heads (H is a
multiple of G), D = head dimension.

Segments of whole sequences go through the kernels of `kernels`. Those of sequences that are cut attend to their prefix
in the pack's store as well, by the block pairs of `blocks`, as if ranks shared them and there were one (`sharing`);
whole sequences too where scores are capped or have sinks, which blocks alone know. Those that are generated attend to
what a cache holds of them (`cached`).

Values of another width than queries and keys (multi-head latent attention) are taken as well: the narrower ones are
filled up with zeros, which change neither scores nor sums, so that every kernel, store and exchange knows one width.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.errors import EvenloadError
from ...core.plan.step_plan import Slice
from .cached import cached_attention
from .kernels import KernelCall, choose_kernel
from .pack import Pack, SegmentRun
from .scores import ScoreForm
from .sharing.attention import shared_attention
from .sharing.running_job import joined
from .sharing.shared import Shared
from .sparse import ALIKE, say_dense, sparse_attention
from .tree import tree_attention


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
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over the earlier tokens of the same sequence; differentiable.

    Args:
        q_THD, k_TGD, v_TGD: queries, keys and values of the pack; a query head h reads key/value head h // (H / G).
            D of the values may be another.
        layer: any number that no other layer of this pipeline stage has.
        scale, window, dropout, softcap, sinks_H: how scores become weights; see `ScoreForm`.

    Returns:
        out_THD, as wide as the values; 0 where padding is left alone.

    Raises:
        EvenloadError: a slice lacks its prefix, or runs in an order in which its gradients would be wrong.
    """
    scores = ScoreForm(scale, window, dropout, softcap, sinks_H)
    width, wide = v_TGD.shape[-1], max(v_TGD.shape[-1], q_THD.shape[-1])
    if width == q_THD.shape[-1]:
        return _packed(q_THD, k_TGD, v_TGD, pack, layer, scores)
    q_THD, k_TGD, v_TGD = (pad(x, (0, wide - x.shape[-1])) for x in (q_THD, k_TGD, v_TGD))
    return _packed(q_THD, k_TGD, v_TGD, pack, layer, scores)[..., :width]


def _packed(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, layer: int, scores: ScoreForm) -> Tensor:
    if pack.sparse and pack.branching:
        say_dense(ALIKE)
    if pack.shared:
        return _shared(q_THD, k_TGD, v_TGD, pack.shared, layer, scores)
    if pack.branching:
        if not pack.padding:
            return tree_attention(q_THD, k_TGD, v_TGD, pack.branching, scores)
        real_N = pack.real_slots
        out_NHD = tree_attention(q_THD[real_N], k_TGD[real_N], v_TGD[real_N], pack.branching, scores)
        return torch.zeros_like(q_THD).index_copy(0, real_N, out_NHD)
    if pack.cached:
        return cached_attention(q_THD, k_TGD, v_TGD, pack.cached, layer, scores)
    runs, spans = pack.layout
    if len(spans) == 1:
        return _attend(q_THD, k_TGD, v_TGD, runs[0], layer, scores)
    # split, not a slice per span: see `kernels`.
    parts = [torch.split(x, [span.size for span in spans]) for x in (q_THD, k_TGD, v_TGD)]
    outs = [q_THD.new_zeros(()).expand(span.size, *q_THD.shape[1:]) for span in spans]
    for number, run in enumerate(runs):
        places = [place for place, span in enumerate(spans) if span.run == number]
        q, k, v = (joined([part[i] for i in places]) for part in parts)
        out_NHD = _attend(q, k, v, run, layer, scores)
        for place, out in zip(places, torch.split(out_NHD, [spans[i].size for i in places]), strict=True):
            outs[place] = out
    return torch.cat(outs)


def _attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, run: SegmentRun, layer: int, scores: ScoreForm) -> Tensor:
    if run.sparse:
        dense = partial(_attend, q_NHD, k_NGD, v_NGD, run._replace(sparse=None), layer, scores)
        return sparse_attention(q_NHD, k_NGD, v_NGD, run.sparse, layer, scores, dense)
    if run.cut:
        return _shared(q_NHD, k_NGD, v_NGD, run.cut, layer, scores)
    longest = max(run.lengths)
    if scores.window is not None and scores.window >= longest - 1:
        scores = scores._replace(window=None)
    if scores.softcap is not None or scores.sinks_H is not None:  # known to blocks alone
        return _shared(q_NHD, k_NGD, v_NGD, _whole(run.lengths), layer, scores)
    call = KernelCall(
        q_NHD, k_NGD, v_NGD, run.cu_seqlens, run.segments, longest, scores.scale, scores.window, scores.dropout
    )
    return choose_kernel(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1], scores.options).run(call)


@lru_cache(16)
def _whole(lengths: tuple[int, ...]) -> Shared:
    """Whole sequences of these lengths, for blocks."""
    pieces = tuple(Slice(number, 0, length) for number, length in enumerate(lengths))
    return Shared.alone(pieces, None, tuple(accumulate(lengths, initial=0)))


def _shared(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, shared: Shared, layer: int, scores: ScoreForm) -> Tensor:
    if scores.dropout:
        raise EvenloadError(
            "attention dropout cannot be drawn where samples are cut or shared, nor in blocks",
            f"dropout {scores.dropout:g} in layer {layer}",
            "set attention_dropout=0, or keep samples whole (plugins.packing.slices=off, plugins.mesh off)",
        )
    return shared_attention(q_NHD, k_NGD, v_NGD, shared, layer, scores)
