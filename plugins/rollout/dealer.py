"""Deals the samples of a generation by `plugins.rollout`: by what earlier samples of the prompts and siblings that have
ended tell of lengths, and by what a decode step costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.aliases import Ints
from ...core.costs.decode import DecodeCost
from ...core.planning.setting import costs_named
from ...core.recipe.recipe import Recipe
from ...runtime.generate.dealing import Dealer, Dealing, Forwards, GenerationStats, SampleAssignment
from ...runtime.generate.drafts import DraftCounts
from ...runtime.generate.request import Completion, Request
from . import (
    H100_7B,
    LengthDistributions,
    RolloutCosts,
    RolloutRequest,
    SampledLengths,
    bound_of,
    fit_lengths,
    move,
    steps_of,
    tie_plan,
)

_BORDERS = 32
"""From the first token to the largest limit, where nobody says how often samples are dealt again."""
_BORDER_S, _BORDER_SHARE = 2e-3, 0.01
"""What a border takes where nothing moves, and the most that it may take of the steps before it."""


class ByLength(Dealer):
    """Deals by expected seconds where lengths are known, in turn where they are not.

    Args:
        costs: of decode steps, as measured; None: proportions of a large model on a large card, and no moves.
        known: earlier samples of the same prompts.
        move_every: decode steps of a mean rank after which samples are dealt again; 0: never, None: by the costs.
    """

    def __init__(self, costs: DecodeCost | None, known: Sequence[Completion], move_every: int | None) -> None:
        self._measured = costs is not None
        self._costs = RolloutCosts(**costs.model_dump(exclude={"fit_error"})) if costs else H100_7B
        self._known = known
        self._every = 0 if move_every is None and costs is None else move_every
        self._stats: GenerationStats | None = None

    def deal(self, dealing: Dealing) -> SampleAssignment:
        """Deal samples in the form that `Dealer.deal` has."""
        left = np.flatnonzero(dealing.ended == 0)
        request, lengths, every = _request(dealing, left), self._lengths(dealing), self._every_of(dealing)
        ranks = dealing.ranks[left]
        if lengths is None:
            dealt = super().deal(dealing) if ranks.min() < 0 else dealing.as_it_is
            steps = steps_of(dealt.places(len(dealing.of))[left], request, self._costs, every) if every else None
            return dealt._replace(forwards=steps)
        if ranks.min() >= 0:
            plan, _, steps = move(request, ranks, lengths, self._costs, every)
        else:
            plan = tie_plan(request, lengths, self._costs)
            steps = steps_of(plan.of_samples, request, self._costs, every) if every else None
        return SampleAssignment(tuple(left[own] for own in plan.ranks), plan.planner, steps)

    def ran(self, stats: GenerationStats) -> None:
        """Keep what came of it, for `report`."""
        self._stats = stats

    def report(self, requests: Sequence[Request], samples: Sequence[Completion], slots: int) -> dict[str, Any]:
        """How the samples that some requests asked for were dealt, and how far the ranks stayed from a bound, by counts
        and, predicted by measured costs, in seconds. Empty where there was nothing to deal."""
        if self._stats is None:
            return {}
        stats, lengths = self._stats, np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
        places = {request.number: place for place, request in enumerate(requests)}
        prompts = np.array([places[sample.prompt] for sample in samples], dtype=np.int64)
        sizes = np.array([len(request.tokens) for request in requests], dtype=np.int64)
        num_ranks, limit = len(stats.work), int(lengths.max())
        forwards = [sum(work.forwards for work in of_rank) for of_rank in stats.work]
        least = max(limit, math.ceil(lengths.sum() / (num_ranks * slots)))
        report: dict[str, Any] = {"dealt": stats.dealer, "forwards": forwards, "least_forwards": least}
        report |= {"borders": max(0, len(stats.work[0]) - 2), "moved": stats.moved, "moved_tokens": stats.moved_tokens}
        if not self._measured:
            return report
        request = RolloutRequest(prompts, sizes, num_ranks, limit, slots, int(sizes.max()) + limit)
        bound_s, rank_s = bound_of(request, lengths, self._costs).bound_s, self._seconds(stats)
        return {**report, "bound_s": bound_s, "predicted_s": float(rank_s.max(axis=0).sum())}

    @property
    def drafts(self) -> dict[str, Any] | None:
        """What came of drafts; None: there were none."""
        counts = self._stats.drafts if self._stats else DraftCounts()
        own = {"tokens_a_forward": counts.tokens_a_forward, "drafted": counts.drafted, "accepted": counts.accepted}
        return own if counts.forwards else None

    def _seconds(self, stats: GenerationStats) -> Any:
        """Predicted, of each rank between two borders: float64 [R, borders]."""
        by_border = zip(*stats.work, strict=True)
        return np.array([[_seconds(work, self._costs) for work in of_ranks] for of_ranks in by_border]).T

    def _every_of(self, dealing: Dealing) -> int:
        """Steps of a mean rank until samples are dealt again; 0: never."""
        if self._every is not None:
            return self._every
        limit = int(dealing.limits.max())
        every = max(limit // _BORDERS, math.ceil(_BORDER_S / _BORDER_SHARE / max(self._costs.step_s, 1e-9)))
        return every if every < limit else 0

    def _lengths(self, dealing: Dealing) -> LengthDistributions | None:
        """Distributions of the prompts, by all that is known of them; None: nothing has ended yet."""
        limits = np.array([request.limit for request in dealing.requests], dtype=np.int64)
        places = {request.number: place for place, request in enumerate(dealing.requests)}
        rows = [(places[s.prompt], len(s.tokens), s.ended != "limit") for s in self._known if s.prompt in places]
        own = dealing.tokens > 0
        ended = (dealing.ended == 1) & (dealing.tokens < dealing.limits)
        rows += zip(dealing.of[own].tolist(), dealing.tokens[own].tolist(), ended[own].tolist(), strict=True)
        if not any(ended for *_, ended in rows):
            return None
        of, tokens, ends = (np.array(column) for column in zip(*rows, strict=True))
        return fit_lengths(SampledLengths(of, tokens, ends, np.ones(len(of))), len(limits), limits)


def by_length(recipe: Recipe, known: Sequence[Completion]) -> ByLength:
    """The dealer of a recipe's samples."""
    costs = costs_named(recipe.costs)
    return ByLength(costs.decode if costs else None, known, recipe.generate.move_every)


def _request(dealing: Dealing, left: Ints) -> RolloutRequest:
    """The samples that have not ended, for the planner."""
    sizes = np.array([len(request.tokens) for request in dealing.requests], dtype=np.int64)
    limit = int(dealing.limits.max())
    cap = max(dealing.cache_tokens or 1 << 60, int(sizes.max()) + limit)
    of, done = dealing.of[left], dealing.tokens[left]
    return RolloutRequest(of, sizes, dealing.num_ranks, limit, dealing.slots, cap, done)


def _seconds(work: Forwards, costs: RolloutCosts) -> float:
    forwards, samples, keys, prompts = work
    return costs.step_s * forwards + costs.row_s * samples + costs.key_s * keys + costs.prompt_s * prompts
