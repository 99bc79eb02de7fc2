"""Weights of targets as runs on the axis on which all documents lie one after the other (`cut`)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Floats
from .cut import Cut, TargetSpans


class WeightRuns(NamedTuple):
    """Tokens in a row whose weight is one number; what it is where no target is does not count."""

    start: NDArray[np.int64]
    """[num_runs] place of the first token of each, ascending from 0; it ends where the next one begins."""
    value: Floats
    """[num_runs] the weight of each of its targets."""

    def of(self, start: int, stop: int) -> Floats:
        """Weights of the tokens at places [start, stop)."""
        return self.value[self._run(np.arange(start, stop))]

    def nonzero(self, spans: TargetSpans) -> TargetSpans:
        """The targets whose weight is not 0."""
        zero = self.value == 0
        if not zero.any() or not len(spans.start):
            return spans
        beyond = max(int(spans.stop[-1]), int(self.start[-1]) + 1)
        holes = self.start[zero], np.append(self.start[1:], beyond)[zero]
        borders, where = np.unique(np.concatenate([*spans, *holes]), return_inverse=True)
        sizes = [len(spans.start)] * 2 + [len(holes[0])] * 2
        inside = np.cumsum(np.bincount(where, weights=np.repeat([1, -1, -1, 1], sizes))) > 0
        kept = np.flatnonzero(inside)
        return TargetSpans(borders[kept], borders[kept + 1])

    def sums(self, spans: TargetSpans, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
        """What the weights of the targets at places [start, stop) add up to, for each pair of places."""
        run, last = self._run(start), self._run(np.maximum(stop - 1, start))
        sums = self.value[run] * (spans.before(stop) - spans.before(start))
        for place in np.flatnonzero(run != last).tolist():
            first, end = int(start[place]), int(stop[place])
            sums[place] = self.of(first, end)[spans.mask(first, end)].sum()
        return sums

    def _run(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.start, places, side="right") - 1


def with_weights(
    samples: Cut, lengths: NDArray[np.int64], spans: TargetSpans | None, weights: WeightRuns | None
) -> Cut:
    """Samples of documents of ``lengths``, with what the weights of their targets add up to; without weights as they
    are."""
    if weights is None or spans is None:
        return samples
    firsts = np.concatenate([[0], np.cumsum(lengths)])[samples.document] + samples.start
    stops = firsts + samples.length
    return replace(samples, weight_sums=weights.sums(spans, np.minimum(firsts + 1, stops), stops))
