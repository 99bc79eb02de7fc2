"""Where samples come from: one `Source` over every format, known by a spec.

| spec | data |
|---|---|
| ``python-stdlib`` | the sources of the running Python's library, bytes as tokens |
| ``corpus.jsonl`` | JSON Lines: text, or token ids |
| ``prefix``, ``prefix.idx``, ``prefix.bin`` | Megatron's indexed pair |
| a folder, a file or a pattern of ``.arrow`` or ``.parquet`` | a Hugging Face data set on disk |

Opening reads lengths. `Source.tokens` reads the tokens of one sample, so a rank touches only what it computes.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError
from ..core.input import reading
from . import stdlib
from .arrow import ArrowDocuments
from .bin_idx import BinIdxDocuments
from .cut import Cut, LongSamples, check_cut, cut
from .documents import Documents
from .jsonl import JsonlDocuments
from .locate import nothing_there, table_files
from .parquet import parquet_as_arrow
from .tokenizers import Tokenizer, open_tokenizer


class Source:
    """Samples 0 .. num_samples-1 of documents that are cut; their lengths are known at once, their tokens on demand."""

    def __init__(self, documents: Documents, cut: Cut, vocab_size: int | None = None) -> None:
        self._documents, self._cut, self._declared_vocab_size = documents, cut, vocab_size
        self.name = documents.name
        """Path, or the name of a built-in set."""
        self.lengths = cut.length
        """[num_samples] tokens of each sample; read-only."""
        self.lengths.setflags(write=False)

    @cached_property
    def vocab_size(self) -> int:
        """Every token id is below it. May read all tokens the first time, where nothing else tells."""
        for known in (self._declared_vocab_size, self._documents.vocab_size):
            if known is not None:
                return known
        return self._documents.scan_vocab_size()

    def tokens(self, index: int) -> NDArray[np.int64]:
        """[length] token ids of one sample; the caller owns the array.

        Raises `EvenloadError` when an id is impossible or the data changed on disk.
        """
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sample {index} of {len(self.lengths)}")
        document, start, length = (int(part[index]) for part in (self._cut.document, self._cut.start, self.lengths))
        try:
            tokens = np.array(self._documents.read(document, start, start + length), dtype=np.int64)
        except OSError as error:
            raise EvenloadError(f"cannot read {self._documents.where(document)}", str(error), "restore it") from error
        lowest, highest = int(tokens.min()), int(tokens.max())
        limit = self._declared_vocab_size
        if lowest < 0 or (limit is not None and highest >= limit):
            what = f"{self._documents.where(document)} has a token id that the vocabulary lacks"
            detail = f"{lowest if lowest < 0 else highest}, vocabulary of {'any size' if limit is None else limit}"
            raise EvenloadError(what, detail, "use the tokenizer and the vocabulary that the data was made with")
        return tokens

    def report(self) -> dict[str, Any]:
        """Counts for a log or a table, ready for JSON: what there is, and what was left out and why."""
        return {
            "source": self.name,
            "documents": len(self._documents.lengths),
            "samples": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "longest": int(self.lengths.max()),
            **self._cut.counts,
            "tokens_left_out": self._cut.tokens_left_out,
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal lengths in equal order: tells a resumed run that its data is another."""
        return hashlib.blake2b(self.lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()


def open_source(
    spec: str,
    *,
    max_length: int | None,
    long_samples: LongSamples = "truncate",
    tokenizer: str = "bytes",
    text_key: str = "text",
    min_length: int = 2,
    vocab_size: int | None = None,
) -> Source:
    """Open the data that ``spec`` names (see the table above).

    ``max_length`` tokens a sample (None: no limit), ``min_length`` likewise (2: one token and its target); see `cut`
    for ``long_samples``. ``tokenizer`` is ``bytes`` or a tokenizer.json, for text. ``text_key`` names the field or
    column; by default input_ids, tokens and text are tried. ``vocab_size`` is the model's: data known to exceed it is
    refused here, any other token that does when it is read. Without it a tokenizer file says which ids are possible.

    Raises `EvenloadError` when there is no such data, when it is empty or damaged, or when settings contradict.
    """
    check_cut(max_length, long_samples, min_length)
    words = open_tokenizer(tokenizer)
    documents = _open_documents(spec, words, text_key)
    limit = vocab_size if vocab_size is not None or tokenizer == "bytes" else words.vocab_size
    if limit is not None and documents.vocab_size is not None and documents.vocab_size > limit:
        detail = f"ids up to {documents.vocab_size - 1}, vocabulary of {limit}"
        do = "use the tokenizer that the data was made with, or a model with a larger vocabulary"
        raise EvenloadError(f"the tokens of {spec} do not fit the vocabulary", detail, do)
    samples = cut(documents.lengths, max_length, long_samples, min_length)
    if not len(samples.length):
        left_out = "{empty} empty, {too_short} shorter than {min}, {dropped} longer than {max}".format(
            **samples.counts, min=min_length, max=max_length
        )
        detail = f"{len(documents.lengths)} documents: {left_out}"
        do = "check the data, data.max_length and data.long_samples"
        raise EvenloadError(f"{spec} has no sample to train on", detail, do)
    return Source(documents, samples, limit)


def _open_documents(spec: str, tokenizer: Tokenizer, text_key: str) -> Documents:
    if spec == stdlib.NAME:
        if tokenizer.identity != "bytes":
            raise EvenloadError(f"{spec} is read as bytes", "a tokenizer file", "set data.tokenizer to bytes")
        return stdlib.StdlibDocuments()
    path = Path(os.path.expanduser(spec))
    if reading.is_file(path) and path.suffix == ".jsonl":
        return JsonlDocuments(path, tokenizer, text_key)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if reading.is_file(f"{prefix}.idx") or path.suffix in (".bin", ".idx"):
        return BinIdxDocuments(prefix)
    files = table_files(path)
    if not files:
        raise nothing_there(spec, path)
    if files[0].suffix == ".parquet":
        files = [parquet_as_arrow(files, text_key)]
    return ArrowDocuments(spec, files, tokenizer, text_key)
