"""When a tenant is evaluated, which of its adapters is the best so far, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.recipe.tenant import Evaluate

_MOST_NATS = 700.0
"""The exponential of more is no float64."""


class Stopping:
    """The evaluations of one tenant. ``state``: what `state` gave before a job was resumed.

    The adapter before the first step counts, too: where training made it worse, it is the best one.
    """

    def __init__(self, evaluate: Evaluate, steps: int, state: Mapping[str, Any] | None = None) -> None:
        self._evaluate, self._steps = evaluate, steps
        self.lowest, self.at_step = math.inf, 0
        self.without_gain = 0
        """Evaluations since the one of lowest loss."""
        if state is not None:
            self.lowest = math.inf if state["lowest"] is None else float(state["lowest"])
            self.at_step, self.without_gain = int(state["at_step"]), int(state["without_gain"])

    def due(self, done: int) -> bool:
        """Whether to evaluate when so many steps have been trained."""
        return done % self._evaluate.every == 0 or done == self._steps

    def add(self, done: int, loss: float) -> bool:
        """Take the loss behind so many steps; whether it is the lowest so far."""
        best = loss < self.lowest
        if best:
            self.lowest, self.at_step, self.without_gain = loss, done, 0
        else:
            self.without_gain += 1
        return best

    @property
    def over(self) -> bool:
        """Whether patience is at its end."""
        return self._evaluate.patience is not None and self.without_gain >= self._evaluate.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        lowest = self.lowest if math.isfinite(self.lowest) else None
        return {"lowest": lowest, "at_step": self.at_step, "without_gain": self.without_gain}


def perplexity(loss: float) -> float:
    """exp(loss), of a mean loss in nats."""
    return math.exp(min(loss, _MOST_NATS))
