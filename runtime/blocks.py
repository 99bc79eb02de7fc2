"""Attention of some queries over some keys as a *pair*, forward and backward, so that softmaxes can be put together.

Shape legend: N = queries, M = keys, H = query heads, G = key/value heads (H is a multiple of G), D = head dimension.

    forward    (q, K, V)             -> out, lse        lse = log sum exp(scale * q k) over the keys of the block
    backward   (dout, q, K, V,
                out, lse)            -> dq, dK, dV      out and lse may be those of a softmax over more blocks

Blocks over the same queries are put together by `merge`; the backward of each then takes the merged out and lse, and
the dq of all blocks are added. That is what a prefix needs, and what a ring of ranks needs.

Causal means bottom-right: the last query sees all keys, the one before it all but the last. N <= M then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("evenload")

_SCORES = 1 << 24
"""Scores that the plain row holds at once."""


class Inputs(NamedTuple):
    """What both directions of a block read."""

    q_NHD: Tensor
    k_MGD: Tensor
    v_MGD: Tensor
    causal: bool
    scale: float


Forward = Callable[[Inputs], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Inputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Block(NamedTuple):
    """One row of the table."""

    name: str
    available: Callable[[], bool]
    """Whether this installation has it."""
    supports: Callable[[torch.dtype, torch.device, int], bool]
    """Whether it takes this dtype, device and head dimension."""
    forward: Forward
    """(out_NHD, lse_HN): lse in float32 for half and single precision, in float64 for double."""
    backward: Backward
    """(dout_NHD, inputs, out_NHD, lse_HN) -> (dq_NHD, dk_MGD, dv_MGD) in the dtype of the inputs."""


def merge(out_NHD: Tensor, lse_HN: Tensor, more_NHD: Tensor, more_lse_HN: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the keys of two blocks from the softmaxes over each; -inf in an lse: no keys there."""
    lse = torch.logaddexp(lse_HN, more_lse_HN)
    weight, more = (torch.exp(part - lse).T[:, :, None] for part in (lse_HN, more_lse_HN))
    return (out_NHD * weight + more_NHD * more).to(out_NHD.dtype), lse


def _plain_scores(x: Inputs, first: int, end: int) -> Tensor:
    """scale * q k^T of some queries, masked: [G, H/G, n, M] in float32 at least."""
    q, k = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x.q_NHD[first:end], x.k_MGD))
    groups = k.shape[1]
    scores = torch.einsum("ngrd,mgd->grnm", q.unflatten(1, (groups, -1)), k) * x.scale
    if x.causal:
        ahead = len(x.k_MGD) - len(x.q_NHD) + 1 + first
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(ahead)
        scores.masked_fill_(unseen, -torch.inf)
    return scores


def _rows(x: Inputs) -> list[tuple[int, int]]:
    """The queries in runs whose scores fit."""
    step = max(1, _SCORES // max(1, x.q_NHD.shape[1] * len(x.k_MGD)))
    return [(at, min(len(x.q_NHD), at + step)) for at in range(0, len(x.q_NHD), step)]


def _plain_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for first, end in _rows(x):
        scores = _plain_scores(x, first, end)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[..., None])
        out = torch.einsum("grnm,mgd->ngrd", weights, x.v_MGD.to(weights.dtype))
        outs.append(out.flatten(1, 2).to(x.q_NHD.dtype))
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _plain_backward(dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, groups = lse_HN.dtype, x.k_MGD.shape[1]
    k, v = x.k_MGD.to(wide), x.v_MGD.to(wide)
    dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for first, end in _rows(x):
        weights = torch.exp(_plain_scores(x, first, end) - lse_HN[:, first:end].unflatten(0, (groups, -1))[..., None])
        q, dout, out = (t[first:end].to(wide).unflatten(1, (groups, -1)) for t in (x.q_NHD, dout_NHD, out_NHD))
        dv += torch.einsum("grnm,ngrd->mgd", weights, dout)
        dweights = torch.einsum("ngrd,mgd->grnm", dout, v)
        delta = (dout * out).sum(-1).permute(1, 2, 0)[..., None]
        dscores = weights * (dweights - delta) * x.scale
        dqs.append(torch.einsum("grnm,mgd->ngrd", dscores, k).flatten(1, 2))
        dk += torch.einsum("grnm,ngrd->mgd", dscores, q)
    return torch.cat(dqs).to(x.q_NHD.dtype), dk.to(x.k_MGD.dtype), dv.to(x.v_MGD.dtype)


BLOCKS = (Block("plain", lambda: True, lambda dtype, device, head_dim: True, _plain_forward, _plain_backward),)


@cache
def choose_block(device: torch.device, dtype: torch.dtype, head_dim: int) -> Block:
    """The first row of `BLOCKS` that is there and takes these inputs; chosen, and logged, once for each."""
    block = next(b for b in BLOCKS if b.supports(dtype, device, head_dim) and b.available())
    log.info("attention over a prefix on %s, %s, head dimension %d: %s", device, dtype, head_dim, block.name)
    return block
