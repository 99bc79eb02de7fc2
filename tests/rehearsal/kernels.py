"""Kernels that only CUDA has, by a reference on the CPU, refusing what they refuse.

The flash kernels of torch 2.13 (`aten::_flash_attention_forward` and its backward): half precision, last dimension
contiguous, rows of whole 16 bytes at addresses of whole 16 bytes, head dimension up to 256 and a multiple of 8, heads a
multiple of key and value heads, borders int32 on the device.

The grouped product (`aten::_grouped_mm`, checked as torch's GroupedMMUtils.h does it; the CPU has a kernel of its own):
half precision or float32, matrices whose rows or columns lie behind one another, at addresses and with strides of whole
16 bytes, offsets int32 on the device. In float32 it is a product a group, for whose offsets the host waits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .ledger import refuse
from .storages import on_device, put

HALF = (torch.float16, torch.bfloat16)
_numbers = Tensor.tolist  # as it is before it counts as a wait
calls = {"forward": 0, "backward": 0, "grouped": 0}


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, dropout: float) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not on_device(x):
            raise refuse(f"flash attention: {name} on the host")
        if x.dtype not in HALF or x.dtype != q.dtype:
            raise refuse(f"flash attention: {name} of {x.dtype}")
        if x.stride(-1) != 1:
            raise refuse(f"flash attention: the last dimension of {name} is not contiguous: strides {x.stride()}")
        if x.shape[-1] > 256 or x.shape[-1] % 8:
            raise refuse(f"flash attention: head dimension {x.shape[-1]}")
        if x.data_ptr() % 16 or any(stride * x.element_size() % 16 for stride in x.stride()[:-1]):
            raise refuse(f"flash attention: {name} is not aligned to 16 bytes: strides {x.stride()}")
    if q.shape[-2] % k.shape[-2]:
        raise refuse(f"flash attention: {q.shape[-2]} heads over {k.shape[-2]}")
    for x in (cu_q, cu_k):
        if x is not None and (x.dtype != torch.int32 or not on_device(x) or not x.is_contiguous()):
            raise refuse(f"flash attention: borders of {x.dtype}, on the {'device' if on_device(x) else 'host'}")


def _segments(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> list[tuple[Any, slice, slice]]:
    """(Row of a batch or nothing, queries, keys) of each segment."""
    if cu_q is None or cu_k is None:
        return [(i, slice(0, q.shape[1]), slice(0, k.shape[1])) for i in range(q.shape[0])]
    borders = zip(pairwise(_numbers(cu_q)), pairwise(_numbers(cu_k)), strict=True)
    return [(..., slice(*own), slice(*keys)) for own, keys in borders]


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """Scaled scores [H, N, M] in float32; the last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float().repeat_interleave(groups, 1, output_size=q.shape[1]))
    behind = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
    right = 0 if causal else right
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    hidden |= (behind < -right) if right >= 0 else hidden
    hidden |= (behind > left) if left >= 0 else hidden
    return (scores * scale).masked_fill(hidden, -torch.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    return_mask: bool, *, scale: float | None = None, window_size_left: Any = None, window_size_right: Any = None,
    seqused_k: Any = None, alibi_slopes: Any = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(out like q, logsumexp [B, H, N] or [H, T], two of random state, a mask), as the op on CUDA."""
    _check(q, k, v, cu_q, cu_k, dropout)
    calls["forward"] += 1
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (-1 if x is None else int(x) for x in (window_size_left, window_size_right))
    out = torch.empty_like(q)
    packed = cu_q is not None
    lse = torch.empty((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
    for row, own, keys in _segments(q, k, cu_q, cu_k):
        one = (x[s] if packed else x[row, s] for x, s in ((q, own), (k, keys), (v, keys)))
        queries, key, value = one
        scores = _scores(queries, key, scale, causal, left, right)
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp().nan_to_num(0.0)
        result = torch.einsum("hnm,mhd->nhd", weights, _spread(value, q))
        (out[own] if packed else out[row, own]).copy_(result)
        (lse[:, own] if packed else lse[row][:, own]).copy_(total)
    nothing = torch.empty(2, dtype=torch.uint64)
    extra = (nothing, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype))
    return tuple(put(x) for x in (out, lse, *extra))


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[-2] // x.shape[-2], 1, output_size=q.shape[-2])


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Any, cu_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, rng_state: Any, unused: Any, *, scale: float | None = None,
    window_size_left: Any = None, window_size_right: Any = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    _check(q, k, v, cu_q, cu_k, dropout)
    if grad.stride(-1) != 1 or out.stride(-1) != 1 or not lse.is_contiguous():
        raise refuse("flash attention: strides of what comes back")
    calls["backward"] += 1
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (-1 if x is None else int(x) for x in (window_size_left, window_size_right))
    packed = cu_q is not None
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    for row, own, keys in _segments(q, k, cu_q, cu_k):
        at_q, at_k = (own, keys) if packed else ((row, own), (row, keys))
        queries, key, value, dout = q[at_q], k[at_k], v[at_k], grad[at_q].float()
        total = lse[:, own] if packed else lse[row][:, own]
        weights = (_scores(queries, key, scale, causal, left, right) - total[..., None]).exp().nan_to_num(0.0)
        spread = _spread(value, q)
        rows = (dout * out[at_q].float()).sum(-1).transpose(0, 1)[..., None]
        dscores = weights * (torch.einsum("nhd,mhd->hnm", dout, spread) - rows) * scale
        dq[at_q] += torch.einsum("hnm,mhd->nhd", dscores, _spread(key, q))
        for target, part in (
            (dv, torch.einsum("hnm,nhd->mhd", weights, dout)),
            (dk, torch.einsum("hnm,nhd->mhd", dscores, queries.float())),
        ):
            target[at_k] += part.unflatten(1, (k.shape[-2], -1)).sum(2)
    return tuple(put(g.to(q.dtype)) for g in (dq, dk, dv))  # type: ignore[return-value]


def check_grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> bool:
    """Refuse what the grouped product on CUDA refuses. Gives whether the host waits for it."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in (*HALF, torch.float32) or x.dtype != a.dtype:
            raise refuse(f"grouped product: {name} of {x.dtype}")
        (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
        by_rows, by_columns = across == 1 and down >= max(1, columns), down == 1 and across >= max(1, rows)
        if not (by_rows or by_columns):
            raise refuse(f"grouped product: {name} of strides {x.stride()} and shape {tuple(x.shape)}")
        if (across if by_columns else down) * x.element_size() % 16:
            raise refuse(f"grouped product: strides of {name} should be multiples of 16 bytes: {x.stride()}")
        if x.data_ptr() % 16:
            raise refuse(f"grouped product: {name} is not aligned to 16 bytes")
    if offs is None or offs.dtype != torch.int32 or not on_device(offs) or bias is not None:
        raise refuse("grouped product: offsets are int32 on the device, and there is no bias")
    calls["grouped"] += 1
    return a.dtype == torch.float32


def install() -> None:
    """Let the CPU have the kernels."""
    for name, kernel in (("_flash_attention_forward", flash_forward), ("_flash_attention_backward", flash_backward)):
        LIBRARY.impl(name, kernel, "CPU")


LIBRARY = torch.library.Library("aten", "IMPL")
