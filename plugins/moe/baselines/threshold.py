"""UltraEP (arXiv 2606.04101, section 4): the least threshold under which a greedy rule finds quotas for all excess.

A binary search over thresholds, from 1 % over the mean to the busiest rank. Under each, ranks hand out what they have
over it, the most overloaded first, their hottest experts first, each time to the rank with the most room that has a
free slot and no copy of the expert. A home never hands out more than its excess. Its own time is 0.1 ms on a GPU.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from ....core.aliases import Ints
from ....core.experts.quotas import at_home
from ....core.plan.expert_policy import ExpertPolicy, LayerCopies

_BETA = 1.01
"""The least threshold over the mean that is tried."""

Quotas = list[tuple[int, int, int]]
"""Experts, the ranks that copy them, and their tokens."""


def under_a_threshold(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R]: a `LayerPlanner`."""
    quotas_ER = at_home(counts_RE, policy, copies)
    num_ranks = len(counts_RE)
    tokens: list[int] = quotas_ER.sum(axis=0).tolist()
    loads: list[int] = quotas_ER.sum(axis=1).tolist()
    low, high = min(int(-(-sum(tokens) // num_ranks) * _BETA), max(tokens)), max(tokens)
    best: Quotas = []
    while low <= high:
        threshold = (low + high) // 2
        quotas = _handed_out(tokens, loads, policy, threshold)
        if quotas is None:
            low = threshold + 1
        else:
            best, high = quotas, threshold - 1
    own = len(loads) // num_ranks
    for expert, rank, amount in best:
        quotas_ER[expert, expert // own] -= amount
        quotas_ER[expert, rank] += amount
    return quotas_ER


def _handed_out(tokens: list[int], loads: list[int], policy: ExpertPolicy, threshold: int) -> Quotas | None:
    """Copies after which no rank is over the threshold; None where the rule finds none."""
    space = [max(0, threshold - amount) for amount in tokens]
    excess = [max(0, amount - threshold) for amount in tokens]
    free, own = [policy.slots] * len(tokens), len(loads) // len(tokens)
    quotas: Quotas = []
    if sum(excess) > sum(space):
        return None
    for giver in sorted(range(len(tokens)), key=lambda rank: -excess[rank]):
        for expert in sorted(range(giver * own, giver * own + own), key=lambda e: -loads[e]):
            left = loads[expert]
            takers = {giver}
            while excess[giver] and left:
                able = [rank for rank in range(len(tokens)) if free[rank] and space[rank] and rank not in takers]
                taker = max(able, key=lambda rank: space[rank], default=giver)
                amount = min(excess[giver], space[taker], left)
                if not able or amount < policy.least_tokens:
                    break
                takers.add(taker)
                quotas.append((expert, taker, amount))
                excess[giver] -= amount
                space[taker] -= amount
                left -= amount
                free[taker] -= 1
        if excess[giver]:
            return None
    return quotas
