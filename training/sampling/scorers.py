"""Samples of which each rank scores a part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.cascade import Score, longest_first
from ...runtime.world.agreement import all_or_none, everyone, rank_and_size

log = logging.getLogger("evenload")
Value = TypeVar("Value")
_ALIKE = 8
"""Samples to which a scorer gives one score, all of them, if it is said to tell nothing apart."""


def on_ranks(
    parts: Sequence[Sequence[int]], work: Callable[[Sequence[int]], list[Value]]
) -> tuple[list[Value], Floats]:
    """What ``work`` makes of places of samples, of each rank's part on that rank, in the order of places; and seconds
    of ranks [R]. Collective. Raises an EvenloadError of one rank on all."""
    rank, _ = rank_and_size()

    def timed() -> tuple[list[Value], float]:
        begin = time.perf_counter()
        return work(parts[rank]), time.perf_counter() - begin

    of_ranks = everyone(all_or_none(timed))
    values = {i: one for part, (own, _) in zip(parts, of_ranks, strict=True) for i, one in zip(part, own, strict=True)}
    return [values[place] for place in sorted(values)], np.array([took_s for _, took_s in of_ranks])


def score_on_ranks(
    names: Sequence[str],
    costs: Floats,
    first: Sequence[Sequence[int]],
    work: Callable[[int, Sequence[int]], list[float]],
    alike: set[str],
) -> Score:
    """Scores by ``work``, from the number of a scorer and places of samples: the first one's on the ranks of ``first``,
    what goes on evenly over all of them, by what samples cost [N]. Who gives all samples one score is warned of, and
    joins those that were (``alike``)."""

    def score(number: int, places: Ints) -> tuple[Floats, Floats]:
        dealt = longest_first(costs[places], len(first)) if number else first
        said, took_s = on_ranks([[int(places[i]) for i in own] for own in dealt], lambda own: work(number, own))
        values, name = np.array(said), names[number]
        if number < len(names) - 1 and name not in alike and len(values) >= _ALIKE and np.ptp(values) == 0:
            alike.add(name)
            log.warning(
                "the scorer %s gives each of %d samples %g: it tells nothing apart", name, len(values), values[0]
            )
        return values, took_s

    return score
