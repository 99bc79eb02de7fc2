"""Exact loads planned where the counts are: the closed form of `core.experts.exact` in operations of torch.

No shape depends on the loads, and nothing waits for the host, so that the kernels can be recorded once in a CUDA graph.
Integers are those of numpy on the host.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.experts.exact import Arrays, exact_quotas
from ...core.plan.expert_policy import ExpertPolicy


def exact_on_device(counts_RE: Tensor, policy: ExpertPolicy) -> Tensor:
    """Quotas int64 [E, R] on the device of the counts, int64 [R, E]; of the policy it reads tolerance and nodes.

    A rank has copies of at most E/R experts, which the policy's slots must hold.
    """
    quotas_ER: Tensor = exact_quotas(counts_RE, policy, _arrays(counts_RE.device))
    return quotas_ER


def _arrays(device: torch.device) -> Arrays:
    return Arrays(
        arange=lambda size: torch.arange(size, device=device),
        zeros=lambda shape: torch.zeros(shape, dtype=torch.int64, device=device),
        sort=lambda values: values.sort()[0],
        not_above=lambda ascending, values: torch.searchsorted(ascending, values, right=True),
        below=torch.searchsorted,
        sums=lambda ranks_R, tokens_R: torch.zeros_like(tokens_R).index_add_(0, ranks_R, tokens_R),
        where=torch.where,
        minimum=torch.minimum,
        maximum=torch.maximum,
    )
