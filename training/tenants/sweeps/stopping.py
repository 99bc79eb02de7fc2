"""When a tenant is evaluated, and when it stops because nothing was gained.

The adapter before the first step is evaluated and counts, too: where training only made it worse, it is the best one.
"""

from __future__ import annotations

import math

from ....core.recipe.tenant import Evaluate

_MOST_NATS = 700.0
"""The exponential of more is no float64."""


def is_due(evaluate: Evaluate, done: int, steps: int) -> bool:
    """Whether to evaluate a tenant that has trained so many of its steps."""
    return done % evaluate.every == 0 or done == steps


def next_due(evaluate: Evaluate, done: int, steps: int) -> int:
    """Steps behind which the next evaluation comes."""
    return min(steps, (done // evaluate.every + 1) * evaluate.every)


def without_gain(evaluate: Evaluate, done: int, best_step: int, steps: int) -> int:
    """Evaluations up to this step since the one of lowest loss, which was behind ``best_step``."""
    last = done == steps and done % evaluate.every != 0 and best_step < done
    return done // evaluate.every - best_step // evaluate.every + last


def is_over(evaluate: Evaluate, done: int, best_step: int, steps: int) -> bool:
    """Whether patience is at its end."""
    return evaluate.patience is not None and without_gain(evaluate, done, best_step, steps) >= evaluate.patience


def perplexity(loss: float) -> float:
    """exp(loss), of a mean loss in nats."""
    return math.exp(min(loss, _MOST_NATS))
