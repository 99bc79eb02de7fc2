"""From logits to tokens: temperature, top-k and top-p, then the largest of log-probability and noise.

Shape legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .request import Sampling


def allowed(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Logits of what may be drawn [R, V], divided by the temperature; -inf of all other tokens."""
    scores_RV = logits_RV / (sampling.temperature or 1.0)
    if 0 < sampling.top_k < scores_RV.shape[1]:
        least_R1 = scores_RV.topk(sampling.top_k).values[:, -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < least_R1, -math.inf)
    if sampling.top_p < 1.0:
        sorted_RV, order_RV = scores_RV.sort(descending=True, stable=True)
        shares_RV = sorted_RV.softmax(-1)
        before_RV = shares_RV.cumsum(-1) - shares_RV
        outside_RV = torch.zeros_like(scores_RV, dtype=torch.bool)
        outside_RV.scatter_(1, order_RV, before_RV >= sampling.top_p)
        scores_RV = scores_RV.masked_fill(outside_RV, -math.inf)
    return scores_RV


def pick(logits_RV: Tensor, noise_RV: Tensor | None, sampling: Sampling) -> Tensor:
    """Tokens, and the log-probability that the model itself gives each: float64 [2, R].

    Args:
        noise_RV: of `noise.gumbel`; None where the temperature is 0.
    """
    logits_RV = logits_RV.double()
    scores_RV = logits_RV if noise_RV is None else allowed(logits_RV, sampling) + noise_RV
    tokens_R = scores_RV.argmax(-1)
    log_probs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
    return torch.stack([tokens_R.double(), log_probs_R])
