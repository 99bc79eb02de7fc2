"""Draws global batches in the order of the samples; what a plugin holds back waits here for a later step.

A pure function of data, seed, samples consumed and what waits, so every rank draws the same, and a resumed run goes on
with the same batches. Without a plugin that holds back, a batch is the next ``size`` samples. With one it may hold more
or fewer: the waiting ones that run now (oldest first), then the drawn ones that do not wait. Losses are divided by the
target tokens of what runs, so nothing else changes. Every sample runs exactly once; the saved state names those that
still wait, and for how many ranks the rule decides, because a run that goes on with other ranks must see the same
batches. A state with waiting samples that is resumed without the plugin runs them in its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.errors import EvenloadError
from ...core.planning.chain import PlanChain
from ...core.planning.planner import Draw
from ...data.order import SampleOrder

_NONE = np.zeros(0, dtype=np.int64)


class Waiting(NamedTuple):
    """The queue after a step."""

    samples: Ints
    """Numbers of the samples that wait, oldest first."""
    steps: Ints
    """How many steps each has waited."""
    num_ranks: int
    """Ranks for which the rule decides."""


class Drawing:
    """Gives the next `Draw` at every call; ``state`` of a draw goes into the checkpoint and comes back to `resume`."""

    def __init__(
        self, order: SampleOrder, lengths: Ints, size: int, chain: PlanChain, waiting: Waiting | None = None
    ) -> None:
        self._order, self._lengths, self._size, self._situation = order, lengths, size, chain.context
        asked = [plugin.hold_back(config) for plugin, config in chain.links if plugin.hold_back]
        self._rules = [rule for rule in asked if rule is not None]
        self._waiting = waiting or Waiting(_NONE, _NONE, chain.limits.num_ranks)

    @classmethod
    def resume(cls, state: Mapping[str, Any], lengths: Ints, size: int, chain: PlanChain) -> Drawing:
        """Go on where `Draw.state` was taken. Raises EvenloadError for a state that is damaged or of other data."""
        waiting = _read(state["waiting"], len(lengths)) if "waiting" in state else None
        return cls(SampleOrder.from_state(state, len(lengths)), lengths, size, chain, waiting)

    @property
    def num_ranks(self) -> int | None:
        """Ranks for which a rule decides, those that the run began with; None where nothing is held back."""
        return self._waiting.num_ranks if self._rules else None

    def __call__(self) -> Draw:
        drawn, self._order = self._order.take(self._size)
        samples = np.concatenate([self._waiting.samples, drawn])
        waited = np.concatenate([self._waiting.steps, np.zeros(len(drawn), dtype=np.int64)])
        lengths = self._lengths[samples]
        waits = np.zeros(len(samples), dtype=np.bool_)
        for rule in self._rules:
            waits |= rule(lengths, waited, self._waiting.num_ranks, self._situation)
        assert not waits.all(), "a plugin held back the whole batch"
        self._waiting = self._waiting._replace(samples=samples[waits], steps=waited[waits] + 1)
        runs = ~waits
        delay_steps = float(np.average(waited[runs], weights=lengths[runs]))
        state, waiting = self._order.state(), self._waiting
        if self._rules or len(waiting.samples):
            queue = {"samples": waiting.samples.tolist(), "steps": waiting.steps.tolist(), "ranks": waiting.num_ranks}
            state = {**state, "waiting": queue}
        return Draw(samples[runs], lengths[runs], state, delay_steps)


def num_waiting(state: Mapping[str, Any]) -> int:
    """Samples that still wait after the draw of this state."""
    return len(state["waiting"]["samples"]) if "waiting" in state else 0


def _read(queue: Any, num_samples: int) -> Waiting:
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        samples, steps = (np.array(queue[name], dtype=np.int64) for name in ("samples", "steps"))
        waiting = Waiting(samples, steps, int(queue["ranks"]))
        whole = waiting.samples.ndim == 1 and waiting.samples.shape == waiting.steps.shape and waiting.num_ranks > 0
        if whole and ((waiting.samples >= 0) & (waiting.samples < num_samples)).all():
            return waiting
    raise EvenloadError("the saved queue of waiting samples is damaged", f"{queue}", "resume from another checkpoint")
