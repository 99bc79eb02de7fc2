"""What turns rows into documents: token ids, and what each token counts as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..targets import IGNORE

Row = Mapping[str, Any]


class Placed(NamedTuple):
    """A row, and its place for messages: ``line 12 of corpus.jsonl``."""

    place: str
    row: Row


class Encoded(NamedTuple):
    """A document's token ids and labels."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """[length] at each token's own place, `IGNORE` where it carries no loss."""

    @classmethod
    def behind(cls, tokens: Sequence[int], prompt: int) -> Encoded:
        """A document whose first ``prompt`` tokens carry no loss."""
        ids = np.array(tokens, dtype=np.int64)
        labels = ids.copy()
        labels[:prompt] = IGNORE
        return cls(ids, labels)


class Encoder(Protocol):
    """Makes the documents of rows of one kind."""

    identity: str
    """Equal for encoders that make the same of a row: part of the name of what is kept in the cache."""
    fields: tuple[str, ...]
    """What it reads of a row, where it is there."""
    tokenises: bool = True
    """Whether its documents are made of text; else a row is one document."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below it; 0 where only the rows tell."""

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        """The documents of each row. Raises EvenloadError with the row's place."""


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length
