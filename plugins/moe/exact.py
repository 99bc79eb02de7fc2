"""Exact loads: the busiest rank of a group computes ceil(mean) tokens, and every rank takes from at most one other.

Walker's alias argument (1974): a rank below the mean is filled whole by one rank above it, which is filled by the next
one where it falls below the mean itself. So a rank needs at most E/R copies, whatever the loads.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import numpy as np

from ...core.aliases import Ints
from ...core.experts.quotas import at_home
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies


def exact(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] of which no rank has more than ceil(mean) tokens: a `LayerPlanner`."""
    quotas_ER = at_home(counts_RE, policy, copies)
    num_experts, num_ranks = quotas_ER.shape
    own = num_experts // num_ranks
    tokens = quotas_ER.sum(axis=0)
    mean, more = divmod(int(tokens.sum()), num_ranks)
    over = tokens - (mean + (np.arange(num_ranks) < more))
    while (giver := int(over.argmax())) != (taker := int(over.argmin())) and over[giver] > 0:
        amount = -int(over[taker])
        for expert in sorted(range(giver * own, giver * own + own), key=lambda e: -int(quotas_ER[e, giver])):
            moved = min(amount, int(quotas_ER[expert, giver]))
            quotas_ER[expert, giver] -= moved
            quotas_ER[expert, taker] += moved
            amount -= moved
        over[giver] += int(over[taker])
        over[taker] = 0
    return quotas_ER
