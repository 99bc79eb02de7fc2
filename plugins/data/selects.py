"""Selections by scores: take n of a pool of N.

    random        any n
    loss          one third of the pool by loss (low, medium, high) has ``factor`` times the chance: p ~ w^(1/T)
    delta_loss    d = loss at the start - loss now, falling: places [s, s + 0.2 N) of d >= 0 have 1, else ``outside``
                  s = 0.8 N / (1 + exp(-10 (k / U - 1/2))) at update k of U, rounded down
    less          the n largest of: max over tasks of the mean cosine of gradients with those of the task's validation
                  samples (LESS, arXiv 2402.04333; gradients as `projection` has them)
    online        the n largest of loss now, or of loss now - loss of a reference model where there is one (RHO-LOSS,
                  arXiv 2206.07137); draw a pool a step

Draws are without replacement (`draws`). A selection depends on numbers and what is known of them, not on their order.
In the first update any n. O(N log N), and O(N M k) for less.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.input.bounds import Amount, Count
from ...core.input.validation import Frozen
from ...core.policies import DataPolicy, Pool, State
from .draws import drawn, largest

Selected = tuple[State, Ints]


class LossThirds(Frozen):
    """Settings of a selection by thirds of loss."""

    third: Literal["low", "medium", "high"] = "medium"
    bounds: tuple[float, float] = (0.33, 0.66)
    """Quantiles between the thirds."""
    factor: Amount = 5.0
    temperature: Amount = 1.0
    """T"""


class DeltaLoss(Frozen):
    """Settings of a selection by progress."""

    updates: Count = 10
    """U, how many there will be."""
    width: Amount = 0.2
    """The part of the pool that the window has."""
    outside: Amount = 0.025


def any_of(pool: Pool) -> Ints:
    """What is taken where nothing is known."""
    return drawn(pool.numbers, np.ones(len(pool.numbers)), pool.take, seed=pool.seed, update=pool.update)


def _start(pool: Pool, _: Frozen) -> Selected:
    return {}, any_of(pool)


def _at_random(state: State, pool: Pool, _: Frozen) -> Selected:
    return state, any_of(pool)


def third_probabilities(losses: Floats, settings: LossThirds) -> Floats:
    """[N], in the order of the losses [N]; they add up to 1."""
    low, high = np.quantile(losses, settings.bounds)
    inside = {
        "low": losses <= low,
        "medium": (losses > low) & (losses <= high),
        "high": losses > high,
    }[settings.third]
    odds = np.where(inside, settings.factor, 1.0) ** (1 / settings.temperature)
    return odds / math.fsum(odds)


def _by_third(state: State, pool: Pool, settings: LossThirds) -> Selected:
    assert pool.losses is not None
    probabilities = third_probabilities(pool.losses, settings)
    return state, drawn(pool.numbers, probabilities, pool.take, seed=pool.seed, update=pool.update)


def _start_delta(pool: Pool, _: DeltaLoss) -> Selected:
    assert pool.losses is not None
    return {"numbers": pool.numbers.tolist(), "losses": pool.losses.tolist()}, any_of(pool)


def progress_probabilities(numbers: Ints, progress: Floats, update: int, settings: DeltaLoss) -> Floats:
    """[N] for progress d [N] of the samples with these numbers; they add up to 1."""
    count = len(numbers)
    order = np.lexsort((numbers, -progress))
    start = 0.8 * count / (1 + math.exp(-10 * (update / settings.updates - 0.5)))
    places = np.empty(count, dtype=np.int64)
    places[order] = np.arange(count)
    first = math.floor(start)
    inside = (places >= first) & (places < first + math.floor(settings.width * count)) & (progress >= 0)
    odds = np.where(inside, 1.0, settings.outside)
    return odds / math.fsum(odds)


def _by_progress(state: State, pool: Pool, settings: DeltaLoss) -> Selected:
    assert pool.losses is not None
    before = dict(zip(state["numbers"], state["losses"], strict=True))
    progress = np.array([before[number] for number in pool.numbers.tolist()]) - pool.losses
    probabilities = progress_probabilities(pool.numbers, progress, pool.update, settings)
    return state, drawn(pool.numbers, probabilities, pool.take, seed=pool.seed, update=pool.update)


def cosine_scores(pool: Pool) -> Floats:
    """[N] the largest, over tasks, of the mean cosine of each gradient with those of the task's validation samples."""
    assert pool.gradients is not None
    assert pool.query_gradients is not None
    own, wanted = (_unit(rows) for rows in (pool.gradients, pool.query_gradients))
    tasks = np.zeros(len(wanted), dtype=np.int64) if pool.tasks is None else pool.tasks
    means = [own @ wanted[tasks == task].mean(axis=0) for task in np.unique(tasks)]
    best: Floats = np.max(means, axis=0)
    return best


def _unit(rows: Floats) -> Floats:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def once_started(state: State | None, numbers: Ints) -> Ints:
    """Whose gradients a selection wants that takes any samples first."""
    return numbers[:0] if state is None else numbers


def _by_gradient(state: State, pool: Pool, _: Frozen) -> Selected:
    return state, largest(pool.numbers, cosine_scores(pool), pool.take)


def _by_loss_now(state: State, pool: Pool, _: Frozen) -> Selected:
    assert pool.losses is not None
    learnable = pool.losses if pool.reference is None else pool.losses - pool.reference
    return state, largest(pool.numbers, learnable, pool.take)


BY_SCORE = {
    "random": DataPolicy(_start, _at_random),
    "loss": DataPolicy(_start, _by_third, LossThirds, needs=("losses",)),
    "delta_loss": DataPolicy(_start_delta, _by_progress, DeltaLoss, needs=("losses",), same_pool=True),
    "less": DataPolicy(_start, _by_gradient, needs=("gradients", "query_gradients"), gradients_of=once_started),
    "online": DataPolicy(_start, _by_loss_now, needs=("losses",)),
}
"""By the names that recipes have."""
