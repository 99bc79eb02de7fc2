"""Longest samples first, each to the rank with the least work, in packs as they come (Graham's LPT)."""

from __future__ import annotations

from evenload.core.plan.step_plan import Lengths

NAME = "longest first"
SOURCE = "Graham, Bounds on Multiprocessing Timing Anomalies, 1969"


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    packs: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = work.index(min(work))
        work[rank] += 24576.0 * lengths[sample] + float(lengths[sample]) ** 2
        fits = packs[rank] and sum(lengths[i] for i in packs[rank][-1]) + lengths[sample] <= cap
        packs[rank][-1:] = [[*packs[rank][-1], sample]] if fits else [*packs[rank][-1:], [sample]]
    return packs
