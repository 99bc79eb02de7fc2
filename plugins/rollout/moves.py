"""Deals the samples that live again, at borders: few, one at a time from the rank that would end last to the first.

    left_s    expected seconds of what a sample has yet to get, given that it lives that long
    move      the sample of the last rank that is nearest to half of its distance to the first, if its keys, which are
              computed again, cost less than what it gains

Nothing moves while ranks are even to 2 % of the mean. Until the next border each rank runs as many steps as take it
equally long by its samples and keys: after equally many, ranks with few samples would wait for those with many (on 32
ranks a rollout of 13K tokens ends 1.4 % earlier so; see benchmarks/results/rollouts.md). O(S) a moved sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from .costs import RolloutCosts
from .deal import left_s
from .lengths import LengthDistributions
from .plan import RolloutPlan, RolloutRequest
from .score import Expected, expected

_EVEN = 0.02
"""Of a mean rank's seconds: nothing moves for less."""


class MovedPlan(NamedTuple):
    """Where samples go on, and for how many decode steps."""

    plan: RolloutPlan
    ranks: Ints
    """Of each sample [S]."""
    steps: Ints
    """Of each rank until the next border [R]."""


def move(
    request: RolloutRequest, ranks: Ints, distributions: LengthDistributions, costs: RolloutCosts, every: int
) -> MovedPlan:
    """Deal the same on every rank that knows the samples that live, their tokens (``request.done``) and ``ranks`` [S].

    ``every``: steps of a mean rank from border to border.
    """
    lengths = expected(distributions, request.prompts, request.done)
    keys = request.prompt_tokens[request.prompts] + request.done
    price_s = np.where(request.done > 0, costs.prompt_s * keys, 0.0)
    now = levelled(ranks, left_s(lengths, request, costs), request.num_ranks, price_s)
    return MovedPlan(ordered(now, lengths, request), now, steps_of(now, request, costs, every))


def levelled(ranks: Ints, seconds: Floats, num_ranks: int, price_s: Floats | None = None) -> Ints:
    """Ranks of samples [S] whose expected ``seconds`` [S] are even; a sample that ends on another rank than it was on
    takes ``price_s`` [S] more there."""
    home, ranks = ranks, ranks.copy()
    price, taken_s = np.zeros(len(ranks)) if price_s is None else price_s, seconds.copy()
    loads = np.bincount(ranks, seconds, num_ranks)
    least = _EVEN * max(loads.mean(), 1e-12)
    for _ in range(len(ranks)):
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = loads[high] - loads[low]
        own = np.flatnonzero(ranks == high)
        there_s = seconds[own] + np.where(home[own] == low, 0.0, price[own])
        gain = np.minimum(taken_s[own], gap - there_s)
        place = int(gain.argmax())
        if gap <= least or gain[place] <= 0:
            break
        best = own[place]
        loads[high] -= taken_s[best]
        loads[low] += there_s[place]
        ranks[best], taken_s[best] = low, there_s[place]
    return ranks


def ordered(ranks: Ints, lengths: Expected, request: RolloutRequest) -> RolloutPlan:
    """The samples of each rank: those that have tokens first, then least expected first."""
    order = np.lexsort([lengths.mean, (request.done == 0).astype(np.float64)])
    return RolloutPlan(tuple(order[ranks[order] == rank] for rank in range(request.num_ranks)), "moved")


def steps_of(ranks: Ints, request: RolloutRequest, costs: RolloutCosts, every: int) -> Ints:
    """Steps of each rank [R], 1 or more, that take as long as ``every`` of a mean one, by samples and keys as they are
    and as they grow."""
    rows = np.minimum(np.bincount(ranks, minlength=request.num_ranks), request.slots)
    keys = np.bincount(ranks, request.prompt_tokens[request.prompts] + request.done, request.num_ranks)
    share = rows / np.maximum(np.bincount(ranks, minlength=request.num_ranks), 1)
    step_s = costs.step_s + costs.row_s * rows + costs.key_s * (keys * share + rows * every / 2)
    mean_s = step_s[rows > 0].mean() if rows.any() else step_s.mean()
    steps: Ints = np.maximum(1, np.rint(every * mean_s / step_s)).astype(np.int64)
    return steps
