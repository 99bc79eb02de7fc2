"""Weights of the samples of a global batch by their losses in that very step, of the batch of all ranks.

A weight must be known before the first backward of its sample, so the model scores the batch before the step: a third
of a step more, and nothing to remember. Rank 0 asks the policy. What data or recipe weigh is multiplied by its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.planning.planner import Planned
from ...core.policies import ChosenPolicy, SeenSamples, State, started, stepped
from ...runtime.world.agreement import from_first
from .scoring import Scorer


class Weighing:
    """The weights of one run's steps. ``state``: what a checkpoint kept of them."""

    def __init__(self, chosen: ChosenPolicy, scorer: Scorer, state: Mapping[str, Any] | None) -> None:
        self._chosen, self._scorer = chosen, scorer
        settings = chosen.settings.model_dump(mode="json")
        self._identity = {"policy": chosen.name, "settings": settings}
        saved = (state or {}).get("weigh", {})
        self._policy: State | None = saved["state"] if saved.get("of") == self._identity else None

    def weighed(self, planned: Planned) -> Planned:
        """The step with weights of its samples. Collective."""
        draw = planned.draw
        scores = self._scorer.scores(draw.samples)
        seen = SeenSamples(scores.losses, scores.targets)
        weights = from_first(lambda: self._asked(seen))
        return replace(planned, draw=draw._replace(weight=draw.weight * weights))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the weights; whole on rank 0."""
        return {"weigh": {"of": self._identity, "state": self._policy}}

    def _asked(self, seen: SeenSamples) -> Any:
        if self._policy is None:
            self._policy, _ = started(self._chosen, seen)
        self._policy, weights = stepped(self._chosen, self._policy, seen, np.ones(len(seen.losses)))
        return weights
