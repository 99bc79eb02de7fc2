"""Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): at each rung the worse half of the trials ends.

A rung closes when every trial that is still in the race has a loss there, however many of them train at once and in
which order: so which trial wins is a function of the losses alone, never of what fits into memory. A trial that comes
to a rung before the others waits. Of n trials the ceil(n / 2) of lowest loss go on; of two with the same loss the one
that stands first in the sweep. Trials that failed are out of the race, trials that ended by themselves stay in it with
the loss of the adapter that they keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """What a rung that closes comes to."""

    rung: int
    """From 1."""
    go_on: tuple[str, ...]
    dropped: tuple[str, ...]
    """Trials that end here, in the order of the sweep."""


class Halving:
    """The race between the trials of one sweep. ``state``: what `state` gave before a job was resumed."""

    def __init__(
        self, names: Sequence[str], halve_every: int | None, steps: int, state: Mapping[str, Any] | None = None
    ) -> None:
        self._names, self._every = tuple(names), halve_every
        self._num_rungs = 0 if halve_every is None else (steps - 1) // halve_every
        self._rung = 1
        """The next one to close."""
        self._losses: dict[str, dict[int, float]] = {name: {} for name in names}
        """By trial and rung."""
        self._ended: dict[str, float] = {}
        self._out: dict[str, int] = {}
        """Trials that are out of the race, and the rung that each of them did not pass."""
        if state is not None:
            self._rung = state["rung"]
            self._ended = dict(state["ended"])
            self._out = dict(state["out"])
            for name, losses in state["losses"].items():
                self._losses[name] = {int(rung): loss for rung, loss in losses.items()}

    def rung_at(self, step: int) -> int | None:
        """The rung that a trial reaches with so many steps, from 1; None where it reaches none."""
        if self._every is None or step % self._every or not 1 <= step // self._every <= self._num_rungs:
            return None
        return step // self._every

    def waits(self, name: str, step: int) -> bool:
        """Whether a trial that has trained so many steps may not go on yet."""
        rung = self.rung_at(step)
        return rung is not None and rung >= self._rung and name not in self._out

    def arrive(self, name: str, step: int, loss: float) -> None:
        """A trial has come to the rung at this step with this loss."""
        rung = self.rung_at(step)
        if rung is not None:
            self._losses[name][rung] = loss

    def end(self, name: str, loss: float) -> None:
        """A trial has trained all its steps, or stopped by itself; ``loss`` is that of the adapter that it keeps."""
        self._ended[name] = loss

    def fail(self, name: str) -> None:
        """A trial has failed, or was taken away."""
        if name not in self._out:
            self._out[name] = self._rung

    def close(self) -> Verdict | None:
        """Close the next rung if every trial in the race has a loss there; None: some are still on their way."""
        racing = [name for name in self._names if name not in self._out]
        losses = {name: self._loss_at(name, self._rung) for name in racing}
        if self._rung > self._num_rungs or not racing or None in losses.values():
            return None
        ranked = sorted(racing, key=lambda name: _key(losses[name]))
        kept = set(ranked[: -(-len(ranked) // 2)])
        worse = [name for name in racing if name not in kept]
        for name in worse:
            self._out[name] = self._rung
        verdict = Verdict(self._rung, tuple(name for name in racing if name in kept), tuple(worse))
        self._rung += 1
        return verdict

    def out_at(self, name: str) -> int | None:
        """The rung that a trial did not pass; None: it is in the race."""
        return self._out.get(name)

    @property
    def over(self) -> bool:
        """Whether every trial that is still in the race has ended."""
        return all(name in self._out or name in self._ended for name in self._names)

    def ranking(self, losses: Mapping[str, float]) -> list[str]:
        """All trials, best first: those that passed more rungs, then those of lower loss, then in the sweep's order.

        ``losses``: of each trial's last adapter, or of the best one it keeps; those that have none rank last.
        """

        def place(name: str) -> tuple[float, float]:
            passed = self._out.get(name, math.inf)
            return -passed, _key(losses.get(name))

        scored = sorted((name for name in self._names if name in losses), key=place)
        return scored + [name for name in self._names if name not in losses]

    def loss(self, name: str) -> float | None:
        """The loss that a trial ended with, or that it had at the last rung to which it came."""
        losses = self._losses[name]
        return self._ended.get(name, losses[max(losses)] if losses else None)

    def state(self) -> dict[str, Any]:
        """What a job that is resumed needs, ready for JSON."""
        return {"rung": self._rung, "losses": self._losses, "ended": self._ended, "out": self._out}

    def _loss_at(self, name: str, rung: int) -> float | None:
        return self._losses[name].get(rung, self._ended.get(name))


def _key(loss: float | None) -> float:
    """A loss that is not finite is worse than any other."""
    return loss if loss is not None and math.isfinite(loss) else math.inf
