"""A planner of layers that draws: any quotas at all, other ones in every layer of every pass, from the counts alone."""

from __future__ import annotations

import zlib

import numpy as np
from evenload.core.aliases import Ints
from evenload.core.plan.expert_policy import ExpertPolicy, LayerCopies


def drawn_quotas(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Each expert's tokens on a drawn set of ranks, its home often not among them; now and then all of them on one."""
    num_ranks, num_experts = counts_RE.shape
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(counts_RE).tobytes()))
    shares_ER = rng.dirichlet(np.full(num_ranks, rng.choice([0.1, 1.0])), size=num_experts)
    if rng.random() < 0.1:
        shares_ER[:] = np.eye(num_ranks)[rng.integers(num_ranks)]
    return np.stack([rng.multinomial(n, p) for n, p in zip(counts_RE.sum(axis=0), shares_ER, strict=True)])
