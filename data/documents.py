"""What every data format offers: documents of known lengths, read in part and on demand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, nearest
from .samples.cut import TargetSpans
from .samples.weights import WeightRuns

ID_FIELDS = ("input_ids", "tokens")
"""Names under which data sets usually store token ids, looked for in this order and before any text."""

BATCH = 1024
"""Texts tokenised at once: enough for the tokenizer's threads, little to hold."""
_BLOCK = 1 << 24
"""Tokens looked at together when all are searched for the largest id."""


class Documents(Protocol):
    """The documents of one data set, before long ones are cut into samples."""

    name: str
    """Path, or the name of a built-in set."""
    lengths: NDArray[np.int64]
    """[num_documents] tokens, 0 where a document is empty. Known without reading the tokens."""
    vocab_size: int | None
    """Every token id is below it; None where only reading all tokens would tell (`scan_vocab_size` does that)."""
    spans: TargetSpans | None = None
    """Which tokens are targets; None: all are."""
    weighed_spans: TargetSpans | None = None
    """The same with those of weight 0; None: there are no weights."""
    weights: WeightRuns | None = None
    """The weights of targets, none of which is 0; None: each is 1."""
    keys: NDArray[np.int64] | None = None
    """[num_documents] the row that each is of; None: every row is one document, in order."""
    groups: NDArray[np.int64] | None = None
    """[num_documents] those of one number stay together; None: each is by itself."""
    trunks: NDArray[np.int64] | None = None
    """[num_documents] tokens, targets among them alike, that each begins with as all of its group do; None: none."""
    files: Sequence[Path] = ()
    """That are read as long as the data are in use; none of a built-in set."""

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop) of a document, any integer type; possibly a view of a mapped file."""

    def read_labels(self, document: int, start: int, stop: int) -> NDArray[Any]:
        """What tokens [start, stop) count as, `IGNORE` where they carry no loss."""
        return self.read(document, start, stop)

    def scan_vocab_size(self) -> int:
        """Largest token id plus one, reading every token (at most once per file: the answer is cached)."""
        assert self.vocab_size is not None, "known from the lengths"
        return self.vocab_size

    def where(self, document: int) -> str:
        """The document's place, for messages: ``line 12 of corpus.jsonl``."""


def choose_field(fields: Collection[str], text_key: str, where: str) -> str:
    """The field or column that holds the data: ``text_key`` where it is set, else input_ids, tokens or text.

    Raises `EvenloadError` naming the nearest field when there is none of these.
    """
    candidates = [*ID_FIELDS, "text"] if text_key == "text" else [text_key]
    for candidate in candidates:
        if candidate in fields:
            return candidate
    raise missing_field(candidates, fields, where)


def missing_field(wanted: Sequence[str], fields: Collection[str], where: str) -> EvenloadError:
    """The error for data without the field it should have; names the nearest one."""
    what = f"{where} has no field {' or '.join(map(repr, wanted))}"
    return EvenloadError(what, nearest(wanted[-1], fields), "name the field with data.text_key")


def vocab_size_of(arrays: Iterable[NDArray[Any]]) -> dict[str, NDArray[np.int64]]:
    """``vocab_size``, for the cache: largest token id plus one, some millions of tokens at a time."""
    blocks = (tokens[start : start + _BLOCK] for tokens in arrays for start in range(0, len(tokens), _BLOCK))
    return {"vocab_size": np.array([1 + max((int(block.max()) for block in blocks), default=0)], dtype=np.int64)}


def require(module: str, purpose: str) -> Any:
    """Import a module that only some formats need; raise `EvenloadError` naming the package where it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EvenloadError(f"{purpose} needs {package}", str(error), f"pip install {package}") from error


def changed(name: str) -> EvenloadError:
    """The error for data that is no longer what it was when it was opened."""
    return EvenloadError(f"{name} changed while it was in use", "a sample of another length", "start again")
