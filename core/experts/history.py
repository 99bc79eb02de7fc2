"""Loads of experts over the steps of a run: an exponentially weighted mean, in which the newest step counts most.

Routers drift slowly, and one step's loads are noisy, as its samples are. With h the history and x the newest step's
tokens of an expert, h <- DECAY h + (1 - DECAY) x.
"""

from __future__ import annotations

from ..aliases import Floats

Loads = tuple[tuple[float, ...], ...]
"""Tokens of each expert of each layer that has any; empty: none known."""

DECAY = 0.5
"""Of what was known, when a step is added."""


def updated(history: Loads, step_LE: Floats) -> Loads:
    """The history after a step whose layers [L] sent so many tokens to each of their experts [E]."""
    rows = [tuple(map(float, row)) for row in step_LE]
    if not history:
        return tuple(rows)
    pairs = zip(history, rows, strict=True)
    return tuple(tuple(DECAY * h + (1.0 - DECAY) * x for h, x in zip(*pair, strict=True)) for pair in pairs)
