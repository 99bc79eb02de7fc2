"""Weights of the samples of a global batch, w_s in  L = sum_s w_s sum_t l_st / sum_s w_s n_s.

    loss       h_s = (2 l_s - max - min) delta / (max - min),  l_s: mean token loss of a sample; max, min of the batch
               linear min(h + delta, delta)    uniform h    quadratic 1 - (h / delta)^2    extremes |h|
               w_s = exp((score_s - max score) / r) / sum     Dynamic Loss-Based Sample Reweighting, arXiv 2502.06733
    adapt      v_s = sum_t t h_st over its norm (h_st: last hidden states),  c_s = mean cosine with anchors
               w_s = 1 / (1 + exp(-c_s / tau)), between ``low`` and ``high``
    objective  w_s = wanted_i / share_i of the domain i of s: importance weights, as in NeMo Automodel
    column     a number that stands in the data

Minima, maxima and sums are those of the batch of all ranks, so weights do not depend on micro-batches. O(S), and
O(S anchors d) for adapt.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ...core.aliases import Floats
from ...core.input.bounds import Amount, AmountOrNone, Count
from ...core.input.validation import Frozen
from ...core.policies import DataPolicy, SeenSamples, State

Weighed = tuple[State, Floats]


class LossWeights(Frozen):
    """Settings of weights by loss."""

    strategy: Literal["linear", "uniform", "quadratic", "extremes"] = "linear"
    delta: Amount = 1.0
    temperature: Amount = 1.0
    """r"""


class Adapt(Frozen):
    """Settings of weights by likeness."""

    tau: Amount = 1.0
    every: Count = 50
    """Steps of a run between two looks at what is wanted, whose vectors move with the model."""
    low: AmountOrNone = 0.0
    high: AmountOrNone = 1.0


class Objective(Frozen):
    """Settings of importance weights by domain."""

    wanted: tuple[Amount, ...]
    """[K] what the domains are to count in the objective, names ascending."""


def _by_loss(state: State, seen: SeenSamples, settings: LossWeights) -> Weighed:
    losses = seen.losses / np.maximum(seen.targets, 1)
    trained = seen.targets > 0
    if not trained.any():
        raise ValueError("no sample has a target")
    low, high = losses[trained].min(), losses[trained].max()
    delta = settings.delta
    h = (2 * losses - high - low) * delta / (high - low) if high > low else np.zeros(len(losses))
    scores = {
        "linear": np.minimum(h + delta, delta),
        "uniform": h,
        "quadratic": 1 - (h / delta) ** 2,
        "extremes": np.abs(h),
    }[settings.strategy]
    odds = np.where(trained, np.exp((scores - scores[trained].max()) / settings.temperature), 0.0)
    return state, odds / math.fsum(odds)


def _by_likeness(state: State, seen: SeenSamples, settings: Adapt) -> Weighed:
    assert seen.vectors is not None
    anchors = state["anchors"] if seen.anchors is None else _unit(seen.anchors).tolist()
    if not anchors:
        raise ValueError("no anchors yet")
    scores = (_unit(seen.vectors) @ np.array(anchors).T).mean(axis=1)
    weights = np.clip(1 / (1 + np.exp(-scores / settings.tau)), settings.low, settings.high)
    return {"anchors": anchors}, weights


def _unit(vectors: Floats) -> Floats:
    units: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units


def _by_objective(state: State, seen: SeenSamples, settings: Objective) -> Weighed:
    assert seen.domains is not None
    assert seen.shares is not None
    if len(settings.wanted) != len(seen.shares):
        raise ValueError(f"{len(settings.wanted)} wanted, {len(seen.shares)} domains")
    return state, (np.array(settings.wanted) / math.fsum(settings.wanted) / seen.shares)[seen.domains]


def _of_column(state: State, seen: SeenSamples, _: Frozen) -> Weighed:
    assert seen.column is not None
    return state, seen.column


def _all_alike(seen: SeenSamples, _: Frozen) -> Weighed:
    return {}, np.ones(len(seen.losses))


def _without_anchors(seen: SeenSamples, _: Frozen) -> Weighed:
    return {"anchors": []}, np.ones(len(seen.losses))


WEIGHTS = {
    "loss": DataPolicy(_all_alike, _by_loss, LossWeights),
    "adapt": DataPolicy(_without_anchors, _by_likeness, Adapt, needs=("vectors",)),
    "objective": DataPolicy(_all_alike, _by_objective, Objective, needs=("domains", "shares")),
    "column": DataPolicy(_all_alike, _of_column, needs=("column",)),
}
"""By the names that recipes have."""
