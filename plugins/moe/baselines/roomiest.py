"""MoonEP (Moonshot, public reference planner): the rank with the most room is filled whole by the most loaded one.

Until no rank is above its target, floor or ceil of the mean. What a rank then hands to others is of its hottest expert
each time, and goes to the one that still wants most. As many slots as a rank has experts of its own are always enough.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from ....core.aliases import Ints
from ....core.experts.quotas import at_home
from ....core.plan.expert_policy import ExpertPolicy, LayerCopies


def roomiest_first(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R]: a `LayerPlanner`. With fewer slots, what a rank has no slot for stays at home."""
    quotas_ER = at_home(counts_RE, policy, copies)
    num_experts, num_ranks = quotas_ER.shape
    own = num_experts // num_ranks
    for giver, wanted in _transfers(quotas_ER.sum(axis=0).tolist()).items():
        left = {expert: int(quotas_ER[expert, giver]) for expert in range(giver * own, giver * own + own)}
        slots = dict.fromkeys(wanted, policy.slots)
        while any(wanted.values()):
            taker = max(wanted, key=lambda rank: wanted[rank])
            expert = max(left, key=lambda e: left[e])
            amount = min(wanted[taker], left[expert])
            if not quotas_ER[expert, taker]:
                if not slots[taker]:
                    wanted[taker] = 0
                    continue
                slots[taker] -= 1
            quotas_ER[expert, giver] -= amount
            quotas_ER[expert, taker] += amount
            wanted[taker] -= amount
            left[expert] -= amount
    return quotas_ER


def _transfers(tokens: list[int]) -> dict[int, dict[int, int]]:
    mean, more = divmod(sum(tokens), len(tokens))
    over = [amount - mean - (rank < more) for rank, amount in enumerate(tokens)]
    transfers: dict[int, dict[int, int]] = {}
    while True:
        giver = max(range(len(over)), key=lambda rank: over[rank])
        taker = min(range(len(over)), key=lambda rank: over[rank])
        if over[giver] <= 0:
            return transfers
        transfers.setdefault(giver, {})[taker] = -over[taker]
        over[giver] += over[taker]
        over[taker] = 0
