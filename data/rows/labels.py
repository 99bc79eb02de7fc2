"""``labels`` beside ``input_ids``: what each token counts as, at its own place, as Hugging Face models take it.

-100 carries no loss; else a label is the token itself, or another id that is to be learned there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError
from ..jsonl import check_ids
from ..targets import IGNORE
from .encoder import Encoded, Encoder, Placed
from .kinds import LABELS

_DO = "store a label for every token: its id, or -100 where it carries no loss"


class LabelEncoder(Encoder):
    """One document a row; a row without token ids is empty."""

    vocab_size = 0
    tokenises = False

    def __init__(self, field: str) -> None:
        self._field, self.fields = field, (field, LABELS)
        self.identity = f"labels-1 {field}"

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        return [[self._encoded(one)] for one in rows]

    def _encoded(self, one: Placed) -> Encoded:
        tokens, labels = (one.row.get(name) for name in self.fields)
        ids = _integers([] if tokens is None else tokens, self._field, one.place)
        values = _integers([] if labels is None else labels, LABELS, one.place, besides=IGNORE)
        if len(ids) != len(values):
            what = f"the labels of {one.place} are not as many as its tokens"
            raise EvenloadError(what, f"{len(values)} labels, {len(ids)} tokens", _DO)
        return Encoded(ids, values)


def _integers(value: Any, field: str, place: str, besides: int | None = None) -> NDArray[np.int64]:
    """Token ids of a row, or ``besides``. Raises EvenloadError with the first that is neither."""
    ids = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(ids, list) and besides is not None:
        ids = [0 if each == besides else each for each in ids]
    check_ids(ids, field, place)
    return np.array(value, dtype=np.int64)
