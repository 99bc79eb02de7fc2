"""Samples that live are dealt again at borders of steps: few, each from the busiest rank to the idlest.

At a border every rank knows how many tokens each sample has, so what is left of it is foreseen given that it lives that
long, and all ranks move the same samples. A move pays the keys that travel: a rank sends and receives
``move_s`` a key, all ranks at once. Who generates a token changes nothing of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from evenload.core.aliases import Floats, Ints
from evenload.plugins.rollout import LengthDistributions, Rollout, RolloutPlan, expected, plan_rollout
from evenload.plugins.rollout.deal import left_s

_EVEN = 0.02
"""Of a mean rank's seconds: nothing moves for less."""


class MovedRollout(NamedTuple):
    """What a rollout with moves comes to."""

    seconds: float
    busy_s: float
    """Of a mean rank."""
    tokens: Ints
    """Tokens that each sample has [S]."""
    num_moves: int
    moved_keys: int


def levelled(ranks: Ints, seconds: Floats, num_ranks: int) -> Ints:
    """Ranks of samples [S] whose expected ``seconds`` [S] are even: one at a time from the busiest to the idlest."""
    ranks = ranks.copy()
    loads = np.bincount(ranks, seconds, num_ranks)
    least = _EVEN * max(loads.mean(), 1e-12)
    for _ in range(len(ranks)):
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = loads[high] - loads[low]
        own = np.flatnonzero(ranks == high)
        best = own[np.argmin(np.abs(seconds[own] - gap / 2))]
        if gap <= least or seconds[best] >= gap:
            break
        ranks[best] = low
        loads[high] -= seconds[best]
        loads[low] += seconds[best]
    return ranks


def play_moved(rollout: Rollout, distributions: LengthDistributions, every: int, move_s: float = 0.0) -> MovedRollout:
    """Play a rollout whose samples are dealt again after every ``every`` decode steps. All seconds are predicted."""
    request, left = rollout.request, np.arange(len(rollout.lengths))
    tokens, ranks = request.done.copy(), np.zeros(len(left), np.int64)
    for rank, own in enumerate(plan_rollout(request, distributions, rollout.costs).ranks):
        ranks[own] = rank
    seconds = busy_s = 0.0
    num_moves = moved_keys = 0
    while len(left):
        part = replace(request, prompts=request.prompts[left], done=tokens[left])
        lengths = expected(distributions, part.prompts, part.done)
        now = levelled(ranks[left], left_s(lengths, part, rollout.costs), request.num_ranks)
        moved = (now != ranks[left]) & (part.done > 0)
        keys = part.done[moved] + request.prompt_tokens[part.prompts[moved]]
        sent, received = (np.bincount(of[moved], keys, request.num_ranks) for of in (ranks[left], now))
        ranks[left] = now
        order = np.lexsort([lengths.mean, (part.done == 0).astype(np.float64)])
        plan = RolloutPlan(tuple(order[now[order] == rank] for rank in range(request.num_ranks)), "moved")
        played = Rollout(part, rollout.lengths[left], rollout.costs, rollout.reserve).play(plan, every)
        seconds += float(played.rank_s.max()) + move_s * float(np.maximum(sent, received).max())
        busy_s += float(played.rank_s.mean())
        num_moves, moved_keys = num_moves + int(moved.sum()), moved_keys + int(keys.sum())
        tokens[left] = played.tokens
        left = left[np.isnan(played.end_s)]
    return MovedRollout(seconds, busy_s, tokens, num_moves, moved_keys)
