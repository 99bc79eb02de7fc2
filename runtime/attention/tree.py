"""Causal attention in a pack whose segments continue each other: a token sees its own segment and those before it.

Shape legend: T = tokens of the pack, N = tokens of a segment, M = keys, H = query heads, G = key/value heads (H is a
multiple of G), D = head dimension.

    own segments    q of a segment            over its own keys, causal
    trunks          q of all that continues   over the keys of the trunk, no mask      one call a trunk

put together by log-sum-exp (`blocks.merge`). Backward, dK and dV of a trunk are those of its own block and of the one
of all its branches, added in this order, in float32 at least. In a window every segment attends to the end of its path
instead, whose keys are brought together. The price of a trunk is that of the rows it stands in: attention computes as
many pairs as for these alone, but whatever else a layer does runs once (Tree Training, arXiv 2511.00413, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.errors import EvenloadError
from ...core.plan.trie import Branching
from .blocks import BlockKernel, Inputs, choose_block, gradient_of_sinks, merge, with_sinks
from .scores import ScoreForm


class _Part(NamedTuple):
    """Some queries over some keys, both by their places in the pack."""

    queries: slice
    keys: slice | tuple[slice, ...]
    """Of several ranges one after another where there is a window."""
    causal: bool


class _Call(NamedTuple):
    parts: tuple[_Part, ...]
    block: BlockKernel
    scores: ScoreForm
    """Without its sinks."""

    def inputs(self, part: _Part, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Inputs:
        k_MGD, v_MGD = (_rows(x, part.keys) for x in (k_TGD, v_TGD))
        scores, window = self.scores, self.scores.window if part.causal else None
        return Inputs(q_THD[part.queries], k_MGD, v_MGD, part.causal, scores.scale, window, scores.softcap)


def tree_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, branching: Branching, scores: ScoreForm) -> Tensor:
    """`packed_attention` of segments, without padding, that continue each other. Raises EvenloadError for dropout."""
    if scores.dropout:
        raise EvenloadError(
            "attention dropout cannot be drawn where samples share a prefix",
            f"dropout {scores.dropout:g}",
            "set attention_dropout=0, or compute each sample alone",
        )
    if scores.window is not None and scores.window >= branching.longest - 1:
        scores = scores._replace(window=None)
    block = choose_block(q_THD.device, q_THD.dtype, q_THD.shape[-1], scores.options & {"window", "softcap"})
    call = _Call(_parts(branching, scores.window), block, scores._replace(sinks_H=None))
    out: Tensor = _TreeAttention.apply(q_THD, k_TGD, v_TGD, scores.sinks_H, call)  # type: ignore[no-untyped-call]
    return out


@lru_cache(16)
def _parts(branching: Branching, window: int | None) -> tuple[_Part, ...]:
    """What is computed, own segments first."""
    return tuple(_whole_parts(branching) if window is None else _window_parts(branching, window))


def _whole_parts(branching: Branching) -> Iterator[_Part]:
    own = branching.ranges
    yield from (_Part(one, one, True) for one in own)
    for one, end in zip(own, branching.ends, strict=True):
        if end > one.stop:
            yield _Part(slice(one.stop, end), one, False)


def _window_parts(branching: Branching, window: int) -> Iterator[_Part]:
    own = branching.ranges
    for segment, start in enumerate(branching.starts):
        unseen, keys = max(0, start - window), []
        for number in branching.path(segment):
            hidden = min(unseen, branching.lengths[number])
            unseen -= hidden
            keys.append(slice(own[number].start + hidden, own[number].stop))
        yield _Part(own[segment], tuple(keys), True)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sinks_H: Tensor | None, call: _Call) -> Tensor:
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        out_THD = torch.empty_like(q_THD, dtype=wide)
        lse_HT = torch.empty(q_THD.shape[1], len(q_THD), dtype=wide, device=q_THD.device)
        for part in call.parts:
            out, lse = call.block.forward(call.inputs(part, q_THD, k_TGD, v_TGD))
            own = out_THD[part.queries], lse_HT[:, part.queries]
            merged = (out, lse) if part.causal else merge(*own, out.to(wide), lse)
            for whole, new in zip(own, merged, strict=True):
                whole.copy_(new)
        if sinks_H is not None:
            out_THD, lse_HT = with_sinks(out_THD, lse_HT, sinks_H)
        out_THD = out_THD.to(q_THD.dtype)
        ctx.call = call
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, sinks_H, out_THD, lse_HT)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=lse_HT.dtype) for x in (q_THD, k_TGD, v_TGD))
        for part in ctx.call.parts:
            at, inputs = part.queries, ctx.call.inputs(part, q_THD, k_TGD, v_TGD)
            of_part = ctx.call.block.backward(dout_THD[at], inputs, out_THD[at], lse_HT[:, at])
            for whole, places, new in zip((dq, dk, dv), (at, part.keys, part.keys), of_part, strict=True):
                _add(whole, places, new)
        of_sinks = None if sinks_H is None else gradient_of_sinks(dout_THD, out_THD, lse_HT, sinks_H)
        return (
            *(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q_THD, k_TGD, v_TGD), strict=True)),
            None if of_sinks is None or sinks_H is None else of_sinks.to(sinks_H.dtype),
            None,
        )


def _rows(x_TGD: Tensor, places: slice | tuple[slice, ...]) -> Tensor:
    return x_TGD[places] if isinstance(places, slice) else torch.cat([x_TGD[place] for place in places])


def _add(whole_TGD: Tensor, places: slice | tuple[slice, ...], new_MGD: Tensor) -> None:
    """Add to some rows of it what stands one after another."""
    places = (places,) if isinstance(places, slice) else places
    sizes = [place.stop - place.start for place in places]
    for place, part in zip(places, torch.split(new_MGD, sizes), strict=True):
        whole_TGD[place] += part
