"""First-fit-decreasing packs of at most the cap, dealt out in turn."""

from __future__ import annotations

from evenload.core.plan.step_plan import Lengths

NAME = "first fit, in turn"
SOURCE = "axolotl, MultipackBatchSampler"


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    packs: list[list[int]] = []
    free: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((place for place, rest in enumerate(free) if rest >= lengths[sample]), len(packs))
        if place == len(packs):
            packs.append([])
            free.append(cap)
        packs[place].append(sample)
        free[place] -= int(lengths[sample])
    return [packs[rank::num_ranks] for rank in range(num_ranks)]
