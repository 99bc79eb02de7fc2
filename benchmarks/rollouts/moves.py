"""Plays a rollout whose samples are dealt again at borders (`evenload.plugins.rollout.moves`). All seconds are
predicted: a move pays the keys that travel, a rank sending and receiving ``move_s`` a key, all ranks at once, or the
keys that are computed again, as the costs' ``prompt_s`` has it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from evenload.core.aliases import Ints
from evenload.plugins.rollout import LengthDistributions, Rollout, move, plan_rollout


class MovedRollout(NamedTuple):
    """What a rollout with moves comes to."""

    seconds: float
    busy_s: float
    """Of a mean rank."""
    tokens: Ints
    """Tokens that each sample has [S]."""
    num_moves: int
    moved_keys: int


def play_moved(
    rollout: Rollout, distributions: LengthDistributions, every: int, move_s: float = 0.0, *, even_steps: bool = False
) -> MovedRollout:
    """Play a rollout whose samples are dealt again after every ``every`` decode steps of a mean rank.

    ``even_steps``: after equally many of every rank, as ranks in step do.
    """
    request, left = rollout.request, np.arange(len(rollout.lengths))
    costs, tokens = rollout.costs, request.done.copy()
    ranks = plan_rollout(request, distributions, costs).of_samples
    seconds = busy_s = 0.0
    num_moves = moved_keys = 0
    while len(left):
        part = replace(request, prompts=request.prompts[left], done=tokens[left])
        plan, now, steps = move(part, ranks[left], distributions, costs, every)
        moved, keys = (now != ranks[left]) & (part.done > 0), part.done + request.prompt_tokens[part.prompts]
        computed = moved if seconds else np.ones(len(left), bool)
        sent, received, prefilled = (
            np.bincount(of[some], keys[some], request.num_ranks)
            for of, some in ((ranks[left], moved), (now, moved), (now, computed))
        )
        ranks[left] = now
        free = replace(rollout, request=part, lengths=rollout.lengths[left], costs=costs._replace(prompt_s=0.0))
        played = free.play(plan, every if even_steps else steps)
        rank_s = played.rank_s + costs.prompt_s * prefilled
        seconds += float(rank_s.max()) + move_s * float(np.maximum(sent, received).max())
        busy_s += float(rank_s.mean())
        num_moves, moved_keys = num_moves + int(moved.sum()), moved_keys + int(keys[moved].sum())
        tokens[left] = played.tokens
        left = left[np.isnan(played.end_s)]
    return MovedRollout(seconds, busy_s, tokens, num_moves, moved_keys)
