"""Which tokens of documents are targets, as spans, and what of them samples keep when documents are cut.

Documents lie one after the other on one axis; a span is [start, stop) of places on it. So a split document needs no
reading to know the targets of its pieces: n spans and m samples take O(m log n).

A token can be a target only where a token of its sample is before it. Nothing behind a sample's last target takes part
in its loss (attention is causal), so a sample ends there: padding that a data set carries along costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .samples.cut import Cut

IGNORE = -100
"""The label of a token without loss, as PyTorch's cross entropy and Hugging Face's data sets have it."""


class TargetSpans(NamedTuple):
    """The targets of all documents; spans are in order and do not overlap."""

    start: NDArray[np.int64]
    """[num_spans] places of their first tokens."""
    stop: NDArray[np.int64]

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many targets lie before each place."""
        sizes = np.concatenate([[0], np.cumsum(self.stop - self.start)])
        spans = np.searchsorted(self.start, places)
        begun = spans - 1
        beyond = np.where(spans > 0, np.maximum(self.stop[begun] - places, 0), 0) if len(self.start) else 0
        return np.asarray(sizes[spans] - beyond, dtype=np.int64)

    def last_before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place behind the last target before each place; 0 where there is none."""
        if not len(self.start):
            return np.zeros(len(places), dtype=np.int64)
        spans = np.searchsorted(self.start, places)
        return np.where(spans > 0, np.minimum(self.stop[spans - 1], places), 0)


def spans_of(labels: NDArray[np.int64], first: int = 0) -> tuple[list[int], list[int]]:
    """Starts and stops of the spans of a document that begins at place ``first``."""
    counts = np.concatenate([[False], labels != IGNORE, [False]])
    edges = np.flatnonzero(counts[1:] != counts[:-1]) + first
    return edges[::2].tolist(), edges[1::2].tolist()


def with_targets(samples: Cut, lengths: NDArray[np.int64], spans: TargetSpans | None) -> Cut:
    """Samples of documents of ``lengths`` that end at their last targets, with how many of these each has.

    A sample without target keeps its length. Without spans every token is a target, and nothing changes.
    """
    if spans is None:
        return samples
    firsts = np.concatenate([[0], np.cumsum(lengths)])[samples.document] + samples.start
    stops = firsts + samples.length
    targets = spans.before(stops) - spans.before(np.minimum(firsts + 1, stops))
    length = np.where(targets > 0, spans.last_before(stops) - firsts, samples.length)
    left_out = samples.tokens_left_out + int(samples.length.sum() - length.sum())
    return replace(samples, length=length, targets=targets, tokens_left_out=left_out)
