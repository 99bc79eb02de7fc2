"""Attention of some queries over some keys as a *pair*, forward and backward, so that softmaxes can be merged.

Shape legend: N = queries, M = keys, H = query heads, G = key/value heads (H is a multiple of G), D = head dimension.

    forward    q, K, V                   ->  out, lse       lse = log sum exp(scale * q k) over the keys of the block
    backward   dout, q, K, V, out, lse   ->  dq, dK, dV     out and lse may be those of a softmax over more blocks

Blocks over the same queries are merged by `merge`; the backward of each then takes the merged out and lse, and
the dq of all blocks are added (FlashAttention 2, arXiv 2307.08691, section 3.1; Ring Attention, arXiv 2310.01889).
That is what a prefix needs, and what a ring of ranks needs.

Causal means bottom-right: the last query sees all keys, the one before it all but the last. N <= M then. In a window
it sees its own key and as many before it as the window holds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from .kernels import KernelRow, first_of, has, on_gpu

aten = torch.ops.aten

_SCORES = 1 << 24
"""Scores that the plain row holds at once."""
_WINDOW_ROWS = 512
"""Queries that it takes at once, at least, where a window hides keys from all of them."""
_OPTIONS = frozenset({"window", "softcap"})


class Inputs(NamedTuple):
    """What both directions of a block read; views are taken as they are, nothing is copied."""

    q_NHD: Tensor
    k_MGD: Tensor
    v_MGD: Tensor
    causal: bool
    scale: float
    window: int | None = None
    """Keys before its own that a query sees, in a causal block; None: all."""
    softcap: float | None = None
    """A score s counts as softcap * tanh(s / softcap)."""


@dataclass(frozen=True)
class BlockKernel(KernelRow):
    """One row of `BLOCKS`, both directions."""

    forward: Callable[[Inputs], tuple[Tensor, Tensor]]
    """Gives (out_NHD, lse_HN); lse in float64 for float64, else in float32."""
    backward: Callable[[Tensor, Inputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(dout_NHD, inputs, out_NHD, lse_HN) gives (dq_NHD, dk_MGD, dv_MGD) in the dtype of the inputs."""
    options: frozenset[str] = frozenset()
    """Of "window" and "softcap", what of `Inputs` it knows."""


def merge(out_NHD: Tensor, lse_HN: Tensor, more_NHD: Tensor, more_lse_HN: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the keys of two blocks from the softmaxes over each; an lse of -inf means no keys."""
    lse = torch.logaddexp(lse_HN, more_lse_HN)
    weight, more = (torch.exp(part - lse).nan_to_num(0.0).T[:, :, None] for part in (lse_HN, more_lse_HN))
    return torch.addcmul(out_NHD * weight, more_NHD, more).to(out_NHD.dtype), lse


def with_sinks(out_NHD: Tensor, lse_HN: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax with one more score for each head, that of no key: it takes weight from all, and adds nothing."""
    lse = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype)[:, None])
    return (out_NHD * torch.exp(lse_HN - lse).T[:, :, None]).to(out_NHD.dtype), lse


def gradient_of_sinks(dout_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient of the sinks by what `with_sinks` gave, in float32 at least [H]."""
    weights_HN = torch.exp(sinks_H.to(lse_HN.dtype)[:, None] - lse_HN)
    return -(weights_HN * (dout_NHD.to(lse_HN.dtype) * out_NHD).sum(-1).T).sum(1)


def _flash_attn_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_forward
    out_1NHD, lse_1HN, _, _ = function(*(t[None] for t in x[:3]), **_flash_attn_options(x), return_softmax=False)
    return out_1NHD[0], lse_1HN[0]


def _flash_attn_backward(dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    function = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_backward
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3])
    function(
        *(t[None] for t in (dout_NHD, *x[:3], out_NHD)),
        lse_HN.contiguous()[None],  # the kernel reads it without looking at strides
        *(t[None] for t in (dq, dk, dv)),
        **_flash_attn_options(x),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _flash_attn_options(x: Inputs) -> dict[str, Any]:
    left, right = (-1, -1) if x.window is None else (x.window, 0)
    seen = {"causal": x.causal, "window_size_left": left, "window_size_right": right}
    return {"dropout_p": 0.0, "softmax_scale": x.scale, **seen, "softcap": x.softcap or 0.0, "alibi_slopes": None}


def _has_flash_attn() -> bool:
    """With the functions' form of flash_attn 2.7; causal means bottom-right since 2.1."""
    if not has("flash_attn.flash_attn_interface", "_flash_attn_forward"):
        return False
    return Version(importlib.metadata.version("flash_attn")) >= Version("2.7")


def _torch_flash_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    num_queries, num_keys = len(x.q_NHD), len(x.k_MGD)
    out_1NHD, lse_1HN, *_ = aten._flash_attention_forward(
        *(t[None] for t in x[:3]), None, None, num_queries, num_keys, 0.0, x.causal, False, scale=x.scale
    )
    return out_1NHD[0], lse_1HN[0]


def _torch_flash_backward(
    dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=lse_HN.device)
    grads = aten._flash_attention_backward(
        *(t[None] for t in (dout_NHD, *x[:3], out_NHD)),
        lse_HN.contiguous()[None],  # the kernel reads it without looking at strides
        None,
        None,
        len(x.q_NHD),
        len(x.k_MGD),
        0.0,
        x.causal,
        no_dropout,
        no_dropout,
        scale=x.scale,
    )
    dq, dk, dv = (grad[0] for grad in grads)
    return dq, dk, dv


def _has_torch_flash() -> bool:
    available = getattr(torch.backends.cuda, "is_flash_attention_available", None)
    return available is not None and bool(available())


def _cpu_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """torch's CPU kernel, whose causal mask is top-left: what lies before the queries is a block without mask."""
    if not x.causal:
        return _cpu_unmasked_forward(x)
    prefix, own = _cpu_split(x)
    out_1HND, lse_1HN = aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_heads_first, own[:3]), 0.0, True, scale=x.scale
    )
    done = _tokens_first(out_1HND), lse_1HN[0]
    return merge(*_cpu_unmasked_forward(prefix), *done) if prefix else done


def _cpu_backward(dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not x.causal:
        return _cpu_unmasked_backward(dout_NHD, x, out_NHD, lse_HN)
    prefix, own = _cpu_split(x)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_heads_first, (dout_NHD, *own[:3], out_NHD)), lse_HN[None], 0.0, True, scale=x.scale
    )
    dq, dk, dv = map(_tokens_first, grads)
    if prefix is None:
        return dq, dk, dv
    dq_prefix, dk_prefix, dv_prefix = _cpu_unmasked_backward(dout_NHD, prefix, out_NHD, lse_HN)
    return dq.add_(dq_prefix), torch.cat([dk_prefix, dk]), torch.cat([dv_prefix, dv])


def _cpu_split(x: Inputs) -> tuple[Inputs | None, Inputs]:
    before = len(x.k_MGD) - len(x.q_NHD)
    prefix = x._replace(k_MGD=x.k_MGD[:before], v_MGD=x.v_MGD[:before], causal=False)
    return prefix if before else None, x._replace(k_MGD=x.k_MGD[before:], v_MGD=x.v_MGD[before:])


# Without a mask the queries of the heads that share keys may stand in one row of N * H / G queries. The kernel takes
# larger tiles for more queries: 520 queries of 8 heads over 8,192 keys of 2 heads, D 64, float32, one core: forward
# 0.16 to 0.12 s, backward 0.43 to 0.34 s; from 1,024 queries on there is no difference.


def _cpu_unmasked_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    keys, values = map(_heads_first, x[1:3])
    out_1GRD, lse_1GR = aten._scaled_dot_product_flash_attention_for_cpu(
        _folded(x.q_NHD, x), keys, values, 0.0, False, scale=x.scale
    )
    return _unfolded(out_1GRD, x), lse_1GR.view(keys.shape[1], len(x.q_NHD), -1).transpose(1, 2).flatten(0, 1)


def _cpu_unmasked_backward(
    dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, dout, out = (_folded(t, x) for t in (x.q_NHD, dout_NHD, out_NHD))
    keys, values = map(_heads_first, x[1:3])
    lse_1GR = lse_HN.reshape(keys.shape[1], -1, len(x.q_NHD)).transpose(1, 2).flatten(1)[None]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, keys, values, out, lse_1GR, 0.0, False, scale=x.scale
    )
    return _unfolded(grads[0], x), _tokens_first(grads[1]), _tokens_first(grads[2])


def _folded(t_NHD: Tensor, x: Inputs) -> Tensor:
    """[1, G, N * H / G, D]"""
    return _by_group(t_NHD, x).transpose(0, 1).flatten(1, 2)[None]


def _unfolded(t_1GRD: Tensor, x: Inputs) -> Tensor:
    groups, _, dim = t_1GRD[0].shape
    return t_1GRD.view(groups, len(x.q_NHD), -1, dim).transpose(0, 1).flatten(1, 2)


def _heads_first(t_NHD: Tensor) -> Tensor:
    return t_NHD.transpose(0, 1)[None]


def _tokens_first(t_1HND: Tensor) -> Tensor:
    return t_1HND[0].transpose(0, 1)


def _has_cpu_flash() -> bool:
    """With grouped heads, which the kernel knows since torch 2.9 (pytorch/pytorch#157893)."""
    known = hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    return known and Version(torch.__version__).release >= (2, 9)


def _on_cpu(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    return device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _plain_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for first, end in _row_ranges(x):
        scores_GRNM, seen = _plain_scores(x, first, end)
        most_GRN1 = scores_GRNM.amax(-1, keepdim=True)
        weights = scores_GRNM.sub_(most_GRN1).exp_()
        total_GRN1 = weights.sum(-1, keepdim=True)
        out = torch.einsum("grnm,mgd->ngrd", weights, x.v_MGD[seen].to(weights.dtype))
        outs.append((out / total_GRN1.permute(2, 0, 1, 3)).flatten(1, 2).to(x.q_NHD.dtype))
        lses.append((most_GRN1 + total_GRN1.log()).squeeze(-1).flatten(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _plain_backward(dout_NHD: Tensor, x: Inputs, out_NHD: Tensor, lse_HN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (t.to(lse_HN.dtype) for t in x[1:3])
    dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for first, end in _row_ranges(x):
        q, dout, out = (_by_group(t[first:end].to(k.dtype), x) for t in (x.q_NHD, dout_NHD, out_NHD))
        lse_GRN = lse_HN[:, first:end].reshape(x.k_MGD.shape[1], -1, end - first)
        scores, seen = _plain_scores(x, first, end)
        # Of a capped score s, d s / d (scale * q k^T) = 1 - (s / softcap)^2; what is masked has a weight of 0.
        slope = None if x.softcap is None else scores.clamp(min=-x.softcap).div_(x.softcap).square_().neg_().add_(1)
        weights = scores.sub_(lse_GRN[..., None]).exp_()
        dv[seen] += torch.einsum("grnm,ngrd->mgd", weights, dout)
        delta_GRN = (dout * out).sum(-1).permute(1, 2, 0)
        dscores = torch.einsum("ngrd,mgd->grnm", dout, v[seen]).sub_(delta_GRN[..., None]).mul_(weights).mul_(x.scale)
        dscores = dscores if slope is None else dscores.mul_(slope)
        dqs.append(torch.einsum("grnm,mgd->ngrd", dscores, k[seen]).flatten(1, 2))
        dk[seen] += torch.einsum("grnm,ngrd->mgd", dscores, q)
    return torch.cat(dqs).to(x.q_NHD.dtype), dk.to(x.k_MGD.dtype), dv.to(x.v_MGD.dtype)


def _plain_scores(x: Inputs, first: int, end: int) -> tuple[Tensor, slice]:
    """scale * q k^T of queries first .. end-1 over the keys that one of them sees, capped and masked: [G, H / G, n, m]
    in float32 at least; and which keys these are."""
    before = len(x.k_MGD) - len(x.q_NHD)
    seen = slice(0, len(x.k_MGD))
    if x.causal:
        seen = slice(0 if x.window is None else max(0, before + first - x.window), before + end)
    q, k = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x.q_NHD[first:end], x.k_MGD[seen]))
    scores = torch.einsum("ngrd,mgd->grnm", _by_group(q, x), k).mul_(x.scale)
    if x.softcap is not None:
        scores.div_(x.softcap).tanh_().mul_(x.softcap)
    if x.causal:
        ahead = before + first - seen.start + 1
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(ahead)
        if x.window is not None:
            unseen |= torch.ones_like(unseen).tril(ahead - x.window - 2)
        scores.masked_fill_(unseen, -torch.inf)
    return scores, seen


def _by_group(t_NHD: Tensor, x: Inputs) -> Tensor:
    return t_NHD.reshape(len(t_NHD), x.k_MGD.shape[1], -1, t_NHD.shape[-1])


def _row_ranges(x: Inputs) -> list[tuple[int, int]]:
    step = max(1, _SCORES // (x.q_NHD.shape[1] * len(x.k_MGD)))
    if x.causal and x.window is not None:
        step = min(step, max(x.window, _WINDOW_ROWS))
    return [(at, min(len(x.q_NHD), at + step)) for at in range(0, len(x.q_NHD), step)]


BLOCKS = (
    BlockKernel("flash_attn", _has_flash_attn, on_gpu, _flash_attn_forward, _flash_attn_backward, _OPTIONS),
    BlockKernel("torch_flash", _has_torch_flash, on_gpu, _torch_flash_forward, _torch_flash_backward),
    BlockKernel("torch_cpu", _has_cpu_flash, _on_cpu, _cpu_forward, _cpu_backward),
    BlockKernel("plain", lambda: True, lambda *_: True, _plain_forward, _plain_backward, _OPTIONS),
)


@cache
def choose_block(
    device: torch.device, dtype: torch.dtype, head_dim: int, options: frozenset[str] = frozenset()
) -> BlockKernel:
    """The first row of `BLOCKS` that is there, takes these inputs and can do what is asked for ("window", "softcap");
    chosen, and logged, once for each."""
    what = " and ".join(["attention by blocks", *sorted(options)])
    return first_of((row for row in BLOCKS if options <= row.options), device, dtype, head_dim, what)
