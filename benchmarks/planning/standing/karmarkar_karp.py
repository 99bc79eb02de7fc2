"""Largest differencing on work to ranks, then on work to as few micro-batches as a rank's tokens need.

It heeds no cap of tokens, as verl's does not.
"""

from __future__ import annotations

from evenload.core.balance.partition import karmarkar_karp
from evenload.core.plan.step_plan import Lengths

NAME = "karmarkar-karp"
SOURCE = "verl, seqlen_balancing.py"


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    work = (24576.0 * lengths + lengths**2.0).tolist()
    packs = []
    for own in karmarkar_karp(work, num_ranks):
        count = min(len(own), -(-int(lengths[own].sum()) // cap))
        parts = karmarkar_karp([work[i] for i in own], count) if own else []
        packs.append([[own[i] for i in part] for part in parts])
    return packs
