"""Causal attention inside each segment of a pack and nowhere else.

Shape legend: T = slots of the pack, H = query heads, G = key/value heads (H is a multiple of G), D = head dimension.
"""

from __future__ import annotations

import torch

from .kernels import Call, Kernel, choose_kernel


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
