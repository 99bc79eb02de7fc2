"""The plan of a trainer without evenload: equal counts of samples, in order, padded within each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plan.limits import Limits
from ..plan.step_plan import Lengths, MicroBatch, Slice, StepPlan

UNCAPPED = 1 << 40
"""A stock trainer has no token cap; its micro-batches are capped in samples."""


def stock_plan(lengths: Lengths, limits: Limits, micro_batch_size: int = 1) -> StepPlan:
    """Rank r of R computes samples r*m .. r*m+m-1, then those R*m further on, and so on (m = ``micro_batch_size``).

    The samplers of trainers and, up to the order of ranks, PyTorch's DistributedSampler do that. Ranks that the last
    round leaves without samples run dummies where the trainer needs equal counts.
    """
    rounds: list[MicroBatch] = []
    for first in range(0, len(lengths), limits.num_ranks * micro_batch_size):
        for rank in range(limits.num_ranks):
            begin = first + rank * micro_batch_size
            samples = lengths[begin : begin + micro_batch_size].tolist()
            if samples or limits.together > 1 or first == 0:
                pad_to = max(samples) if len(samples) > 1 else 0
                slices = tuple(Slice(begin + i, 0, n) for i, n in enumerate(samples))
                rounds.append(MicroBatch(slices, (rank,), pad_to))
    return StepPlan(lengths, tuple(rounds), replace(limits, max_tokens=UNCAPPED), made_by="stock")


def packed_plan(lengths: Lengths, places: Sequence[tuple[int, int]], limits: Limits) -> StepPlan:
    """The step of a loop whose rows hold samples side by side, without padding. ``places``: (micro-batch, rank) of each
    sample."""
    slices: dict[tuple[int, int], list[Slice]] = {}
    for number, place in enumerate(places):
        slices.setdefault(place, []).append(Slice(number, 0, int(lengths[number])))
    own = tuple(MicroBatch(tuple(slices[place]), (place[1],)) for place in sorted(slices))
    return StepPlan(lengths, own, replace(limits, max_tokens=UNCAPPED), made_by="stock")
