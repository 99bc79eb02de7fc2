"""Attention by its definition, an explicit softmax over one sample, for tests to compare with."""

import torch
from torch import Tensor


def attention(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the log-sum-exp [H, N] of the scores: query i of N sees the keys up to M - N + i.

    Of these it sees itself and ``window`` before it; a sink is the score of no key.
    """
    k_MHD, v_MHD = (x.repeat_interleave(q_NHD.shape[1] // k_MGD.shape[1], dim=1) for x in (k_MGD, v_MGD))
    behind_NM = torch.arange(len(q_NHD))[:, None] + len(k_MGD) - len(q_NHD) - torch.arange(len(k_MGD))
    unseen_NM = ((behind_NM < 0) & causal) | (behind_NM > (len(k_MGD) if window is None else window))
    scores = torch.einsum("nhd,mhd->hnm", q_NHD, k_MHD) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(unseen_NM.to(scores.device), -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, len(q_NHD), 1)], dim=-1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., : len(k_MGD)], v_MHD), scores.logsumexp(-1)


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative error; absolute below a norm of 1, since the gradient of a score that is alone is zero."""
    pairs = zip(found, wanted, strict=True)
    return max(((one.double() - other).norm() / other.norm().clamp(min=1)).item() for one, other in pairs)
