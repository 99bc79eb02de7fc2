"""Documents of rows that say which tokens carry loss.

All rows are encoded once. Lengths and spans of targets stay in the cache, so later openings and other ranks encode
nothing; tokens and labels that a tokenizer made stay there too, 8 bytes a token, and are mapped into memory, so a
sample costs no more than itself. Ids that a data set holds already are read from it, a row at a time; the last one
stays, since tokens and labels are read in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError
from ..cache import Arrays, cached_arrays, cached_file, key_of
from ..documents import BATCH, Documents, changed
from ..samples.cut import TargetSpans, spans_of
from .kinds import Encoded, Encoder, Placed
from .readers import Rows


class RowDocuments(Documents):
    """The documents that an encoder makes of rows. Raises EvenloadError where the cache has no room for them."""

    def __init__(self, rows: Rows, encoder: Encoder) -> None:
        self.name, self.files = rows.name, rows.files
        self._rows, self._encoder = rows, encoder
        scanned: Arrays | None = None

        def write(aside: Path) -> None:
            nonlocal scanned
            with open(aside, "wb") as stream:
                scanned = self._scan(stream)

        key = key_of(rows.files, encoder.identity)
        stored = cached_file(key, ".tokens", write) if encoder.tokenises else None
        scanned = cached_arrays(key, lambda: scanned or self._scan(None))
        self.lengths: NDArray[np.int64] = scanned["lengths"]
        self.keys: NDArray[np.int64] = scanned["keys"]
        self._first = np.cumsum(self.lengths) - self.lengths
        self.vocab_size: int | None = int(scanned["vocab_size"][0])
        if (trunks := scanned.get("trunks")) is not None:
            self.trunks, self.groups = trunks, self.keys
        self.spans = None if scanned["all_count"][0] else TargetSpans(scanned["start"], scanned["stop"])
        self._stored = _map(stored, 2 * int(self.lengths.sum())) if stored else None
        self._last: tuple[int, Encoded] | None = None

    def read(self, document: int, start: int, stop: int) -> NDArray[Any]:
        return self._encoded(document).tokens[start:stop]

    def read_labels(self, document: int, start: int, stop: int) -> NDArray[Any]:
        return self._encoded(document).labels[start:stop]

    def where(self, document: int) -> str:
        return self._rows.where(int(self.keys[document]))

    def _encoded(self, document: int) -> Encoded:
        if self._stored is not None:
            first, length = 2 * int(self._first[document]), int(self.lengths[document])
            return Encoded(*self._stored[first : first + 2 * length].reshape(2, length))
        last = self._last
        if last is None or last[0] != document:
            placed = Placed(self.where(document), self._rows.read(int(self.keys[document])))
            (encoded,) = self._encoder.encode([placed])[0]
            if len(encoded.tokens) != self.lengths[document]:
                raise changed(self.name)
            last = self._last = document, encoded
        return last[1]

    def _scan(self, stream: BinaryIO | None) -> Arrays:
        """What is kept of all documents; their tokens and labels go into the stream, one after the other."""
        keys, lengths, start, stop, trunks = (array("q") for _ in range(5))
        largest, first, all_count = -1, 0, True
        for key, trunk, one in self._all():
            trunks.append(trunk)
            starts, stops = spans_of(one.labels, first)
            start.extend(starts)
            stop.extend(stops)
            keys.append(key)
            lengths.append(len(one.tokens))
            first += len(one.tokens)
            largest = max(largest, int(one.tokens.max(initial=-1)), int(one.labels.max(initial=-1)))
            all_count &= bool((one.tokens[1:] == one.labels[1:]).all())
            if stream is not None:
                stream.write(np.concatenate(one).astype("<i4").tobytes())
        vocab_size = [max(largest + 1, self._encoder.vocab_size, 1)]
        columns = {"keys": keys, "lengths": lengths, "start": start, "stop": stop}
        columns |= {"trunks": trunks} if any(trunks) else {}
        columns |= {"vocab_size": array("q", vocab_size), "all_count": array("q", [all_count])}
        return {name: np.array(column, dtype=np.int64) for name, column in columns.items()}

    def _all(self) -> Iterator[tuple[int, int, Encoded]]:
        """The row, the trunk and the content of every document."""
        rows = self._rows.read_all()
        while batch := list(islice(rows, BATCH)):
            encoded = self._encoder.encode([placed for _, placed in batch])
            for (key, _), documents in zip(batch, encoded, strict=True):
                trunk = _trunk(documents) if self._encoder.branches else 0
                yield from ((key, trunk, one) for one in documents)


def _trunk(documents: Sequence[Encoded]) -> int:
    """Tokens that all documents of a row begin with, each predicting the same target; the last of each is its own."""
    first, size = documents[0], min(len(one.tokens) for one in documents) - 1
    for one in documents[1:]:
        same = (one.tokens[:size] == first.tokens[:size]) & (one.labels[1 : size + 1] == first.labels[1 : size + 1])
        size = size if same.all() else int(same.argmin())
    return size if len(documents) > 1 else 0


def _map(path: Path, count: int) -> NDArray[Any]:
    """The integers of a file of the cache. Raises EvenloadError where they are not as many."""
    if (size := path.stat().st_size) != 4 * count:
        raise EvenloadError(f"{path} is damaged", f"{size} bytes, {4 * count} expected", "delete it")
    return np.memmap(path, dtype="<i4", mode="r") if count else np.zeros(0, dtype=np.int32)
