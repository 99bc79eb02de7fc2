"""How documents become samples: what is longer than ``max_length`` is truncated, split or dropped, and counted.

Targets of documents are spans. Documents lie one after the other on one axis; a span is [start, stop) of places on it.
So a split document needs no reading to know the targets of its pieces: n spans and m samples take O(m log n).

A token can be a target only where a token of its sample is before it. Nothing after a sample's last target takes part
in its loss (attention is causal), so a sample ends there: padding that a data set carries along costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Floats
from ...core.errors import EvenloadError, nearest
from ...core.input.bounds import SAMPLES

LongSamples = Literal["truncate", "split", "drop"]
IGNORE = -100
"""The label of a token without loss, as PyTorch's cross entropy and Hugging Face's data sets have it."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Samples as ranges of documents, in document order. Tokens: documents' = samples' + ``tokens_left_out``."""

    document: NDArray[np.int64]
    """[num_samples] the document that a sample is taken from."""
    start: NDArray[np.int64]
    """[num_samples] its first token in that document."""
    length: NDArray[np.int64]
    """[num_samples] tokens."""
    counts: dict[str, int]
    """Documents that are ``empty``, ``truncated``, ``split``, or ``dropped`` because they are longer than
    ``max_length``, and those ``too_short``: skipped like remainders of split ones below ``min_length``."""
    tokens_left_out: int
    targets: NDArray[np.int64] | None = None
    """[num_samples] targets of each; None: every token but the first is one."""
    weight_sums: Floats | None = None
    """[num_samples] what the weights of these add up to; None: each is 1."""


def cut(lengths: NDArray[np.int64], max_length: int | None, long_samples: LongSamples, min_length: int) -> Cut:
    """Cut documents of ``lengths`` [num_documents] into samples of min_length .. max_length tokens.

    ``split`` makes pieces of exactly ``max_length`` and one remainder; the first token of a piece is context only, as
    that of any sample is. ``max_length=None`` keeps documents whole. Raises `EvenloadError` on impossible settings.
    """
    check_cut(max_length, long_samples, min_length)
    num_empty = int((lengths == 0).sum())
    kept = np.flatnonzero(lengths >= min_length)
    longer = np.zeros(len(kept), dtype=bool) if max_length is None else lengths[kept] > max_length
    num_long, num_remainders = int(longer.sum()), 0
    if max_length is not None and long_samples == "split" and num_long:
        whole, rest = np.divmod(lengths[kept], max_length)
        pieces = whole + (rest >= min_length)
        if int(pieces.sum()) > SAMPLES:
            detail = f"{int(pieces.sum())} of at most {max_length} tokens"
            do = "raise data.max_length, or set data.long_samples to truncate or drop"
            raise EvenloadError(f"documents would be split into more than {SAMPLES} samples", detail, do)
        num_remainders = int(((rest > 0) & (rest < min_length)).sum())
        document = np.repeat(kept, pieces)
        first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = (np.arange(len(document)) - first_piece) * max_length
        length = np.minimum(lengths[document] - start, max_length)
    else:
        document = kept[~longer] if long_samples == "drop" else kept
        start = np.zeros(len(document), dtype=np.int64)
        length = lengths[document] if max_length is None else np.minimum(lengths[document], max_length)
    treated = {"truncate": "truncated", "split": "split", "drop": "dropped"}
    counts = {
        "empty": num_empty,
        "too_short": len(lengths) - len(kept) - num_empty + num_remainders,
        **{name: num_long if policy == long_samples else 0 for policy, name in treated.items()},
    }
    return Cut(document, start, length, counts, int(lengths.sum() - length.sum()))


def check_cut(max_length: int | None, long_samples: str, min_length: int) -> None:
    """Raise `EvenloadError` on settings that no sample can meet; called before any data is read."""
    known = get_args(LongSamples)
    if long_samples not in known:
        detail = f"long_samples={long_samples!r}"
        raise EvenloadError("there is no such way to treat long samples", detail, nearest(long_samples, known))
    if min_length < 1:
        raise EvenloadError("a sample has one token or more", f"min_length={min_length}", "set min_length to 1 or more")
    if max_length is not None and max_length < min_length:
        detail = f"max_length={max_length}, min_length={min_length}"
        raise EvenloadError("no sample can be long enough and short enough", detail, "raise data.max_length")


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
        """The place after the last target before each place; 0 where there is none."""
        if not len(self.start):
            return np.zeros(len(places), dtype=np.int64)
        spans = np.searchsorted(self.start, places)
        return np.where(spans > 0, np.minimum(self.stop[spans - 1], places), 0)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the places [start, stop) are targets."""
        first, last = np.searchsorted(self.stop, start, side="right"), np.searchsorted(self.start, stop)
        mask = np.zeros(max(0, stop - start), dtype=np.bool_)
        for begin, end in zip(self.start[first:last].tolist(), self.stop[first:last].tolist(), strict=True):
            mask[max(0, begin - start) : max(0, end - start)] = True
        return mask


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
