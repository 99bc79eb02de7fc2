"""How documents become samples: what is longer than ``max_length`` is truncated, split or dropped, and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, nearest
from ..core.input.bounds import SAMPLES

LongSamples = Literal["truncate", "split", "drop"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Samples as ranges of documents, in document order. Tokens: documents' = samples' + ``tokens_left_out``."""

    document: NDArray[np.int64]
    """[num_samples] the document that a sample is taken from."""
    start: NDArray[np.int64]
    """[num_samples] its first token in that document."""
    length: NDArray[np.int64]
    """[num_samples] tokens."""
    num_empty: int
    """Documents without a token: skipped."""
    num_too_short: int
    """Documents, or remainders of split ones, below ``min_length``: skipped."""
    num_truncated: int
    num_split: int
    """Documents cut into several samples."""
    num_dropped: int
    """Documents left out because they are longer than ``max_length``."""
    tokens_left_out: int


def cut(lengths: NDArray[np.int64], max_length: int | None, long_samples: LongSamples, min_length: int) -> Cut:
    """Cut documents of ``lengths`` [num_documents] into samples of min_length .. max_length tokens.

    ``split`` makes pieces of exactly ``max_length`` and one remainder; the first token of a piece is context only, as
    that of any sample is. ``max_length=None`` keeps documents whole. Raises `EvenloadError` on impossible settings.
    """
    check_cut(max_length, long_samples, min_length)
    empty = lengths == 0
    too_short = ~empty & (lengths < min_length)
    kept = np.flatnonzero(lengths >= min_length)
    longer = np.zeros(len(kept), dtype=bool) if max_length is None else lengths[kept] > max_length
    num_long, num_remainders = int(longer.sum()), 0
    if max_length is not None and long_samples == "split" and num_long:
        whole, rest = np.divmod(lengths[kept], max_length)
        pieces = whole + (rest >= min_length)
        if int(pieces.sum()) > SAMPLES:
            raise EvenloadError(
                f"documents would be split into more than {SAMPLES} samples",
                f"{int(pieces.sum())} of at most {max_length} tokens",
                "raise data.max_length, or set data.long_samples to truncate or drop",
            )
        num_remainders = int(((rest > 0) & (rest < min_length)).sum())
        document = np.repeat(kept, pieces)
        first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = (np.arange(len(document)) - first_piece) * max_length
        length = np.minimum(lengths[document] - start, max_length)
    else:
        document = kept[~longer] if long_samples == "drop" else kept
        start = np.zeros(len(document), dtype=np.int64)
        length = lengths[document] if max_length is None else np.minimum(lengths[document], max_length)
    counts = {policy: num_long if policy == long_samples else 0 for policy in get_args(LongSamples)}
    return Cut(
        document=document,
        start=start,
        length=length,
        num_empty=int(empty.sum()),
        num_too_short=int(too_short.sum()) + num_remainders,
        num_truncated=counts["truncate"],
        num_split=counts["split"],
        num_dropped=counts["drop"],
        tokens_left_out=int(lengths.sum() - length.sum()),
    )


def check_cut(max_length: int | None, long_samples: str, min_length: int) -> None:
    """Raise `EvenloadError` on settings that no sample can meet; called before any data is read."""
    known = get_args(LongSamples)
    if long_samples not in known:
        raise EvenloadError(
            "there is no such way to treat long samples", f"long_samples={long_samples!r}", nearest(long_samples, known)
        )
    if min_length < 1:
        raise EvenloadError("a sample has one token or more", f"min_length={min_length}", "set min_length to 1 or more")
    if max_length is not None and max_length < min_length:
        raise EvenloadError(
            "no sample can be long enough and short enough",
            f"max_length={max_length}, min_length={min_length}",
            "raise data.max_length",
        )
