"""Best-fit-decreasing packs of at most the cap, dealt out in turn."""

from __future__ import annotations

from evenload.core.balance.partition import best_fit_decreasing
from evenload.core.plan.step_plan import Lengths

NAME = "best fit, in turn"
SOURCE = "TRL, packing strategy bfd"


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    packs = best_fit_decreasing(lengths, cap)
    return [packs[rank::num_ranks] for rank in range(num_ranks)]
