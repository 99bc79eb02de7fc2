"""How documents become samples: what is longer than ``max_length`` is truncated, split or dropped, and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError, nearest
from ...core.input.bounds import SAMPLES

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
    counts: dict[str, int]
    """Documents that are ``empty``, ``truncated``, ``split``, or ``dropped`` because they are longer than
    ``max_length``, and those ``too_short``: skipped like remainders of split ones below ``min_length``."""
    tokens_left_out: int
    targets: NDArray[np.int64] | None = None
    """[num_samples] targets of each; None: every token but the first is one."""


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
