"""Samples as they were drawn, as many to each rank, packed in that order: what a loader without a planner does."""

from __future__ import annotations

from evenload.core.balance.partition import in_order
from evenload.core.plan.step_plan import Lengths

NAME = "in order"
SOURCE = "none"


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    packs = []
    for rank in range(num_ranks):
        own = list(range(rank, len(lengths), num_ranks))
        packs.append([[own[i] for i in pack] for pack in in_order(lengths[own].tolist(), cap)])
    return packs
