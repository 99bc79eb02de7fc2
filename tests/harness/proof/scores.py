"""Scores of sequences by plans that run forward only, against those of whole sequences one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import as_lengths
from evenload.runtime.attention.labels import Labels
from evenload.runtime.attention.pack import IGNORE
from evenload.training.proof.weighing import drawn_weights

from . import LENGTHS, tokens

Plain = dict[int, tuple[torch.Tensor, np.ndarray]]
"""Of each sequence its logits, and the losses of all tokens but the first."""


def half_weighed() -> Labels:
    """Every second token carries loss, with a weight of its own, and of the last sequence none."""
    last, data = len(LENGTHS) - 1, tokens()

    def of(index: int) -> np.ndarray:
        return np.where((np.arange(LENGTHS[index]) % 2 == 1) & (index < last), data(index), IGNORE)

    targets = np.array([int((of(i)[1:] != IGNORE).sum()) for i in range(len(LENGTHS))])
    return drawn_weights(Labels(of, targets), data, as_lengths(LENGTHS), "token", [0])


def off_in_vectors(own: np.ndarray, expected: dict[int, np.ndarray]) -> float:
    return max(float(np.linalg.norm(own[i] - row) / np.linalg.norm(row)) for i, row in expected.items())


def off_in_losses(scores: Any, expected: Plain, labels: Labels | None) -> float:
    """The largest relative error of a sequence's loss, and of that of all; infinite where its targets are others."""
    worst, total, divisor = 0.0, 0.0, 0.0
    for number, (_, losses) in expected.items():
        counts = labels.of(number)[1:] != IGNORE if labels else np.ones(len(losses), dtype=bool)
        if int(scores.targets[number]) != int(counts.sum()):
            return float("inf")
        weights = counts * (labels.weights.of(number)[1:] if labels and labels.weights else 1.0)
        wanted = float((losses * weights).sum())
        worst = max(worst, abs(wanted - float(scores.losses[number])) / max(1.0, abs(wanted)))
        total, divisor = total + wanted, divisor + float(weights.sum())
    return max(worst, abs(scores.loss * divisor / total - 1))


def of_a_reference(index: int) -> np.ndarray:
    """Losses of the tokens of a sequence by another model: about half of them are exceeded."""
    return 5.5 + np.random.default_rng(index).normal(size=LENGTHS[index])


def off_in_excess(scores: Any, expected: Plain, labels: Labels) -> float:
    """The largest relative error of what a sequence's token losses exceed those of a reference by."""
    worst = 0.0
    for number, (_, losses) in expected.items():
        counts = (labels.of(number)[1:] != IGNORE) * labels.weights.of(number)[1:]
        wanted = float((counts * np.maximum(losses - of_a_reference(number)[1:], 0.0)).sum())
        worst = max(worst, abs(wanted - float(scores.excess[number])) / max(1.0, abs(wanted)))
    return worst


def off_by_token(own: torch.Tensor, number: int, expected: Plain, labels: Labels) -> float:
    """The largest error of a token's loss, the first token's among them, which has none."""
    losses = np.append(0.0, np.where(labels.of(number)[1:] != IGNORE, expected[number][1], 0.0))
    return float(np.abs(own.double().numpy() - losses).max())
