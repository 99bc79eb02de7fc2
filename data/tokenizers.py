"""Tokenizers: `bytes`, or any file that the `tokenizers` library wrote (tokenizer.json)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, shorten, shown
from ..core.input import reading
from .documents import require

_DO = "give `bytes` or the path of a tokenizer.json"
_MOST_BYTES = 1 << 30
"""Of a tokenizer.json; those of vocabularies of 256 thousand take 40 MB."""


class Tokenizer(Protocol):
    """Text to token ids. ``identity`` tells two tokenizers apart, for caches of what was made with them."""

    identity: str
    vocab_size: int

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids, int64 [length], of one text."""

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""


class ByteTokenizer:
    """The UTF-8 bytes of the text, 0 .. 255; no special tokens. A lone surrogate counts as one '?'."""

    identity = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(text.encode("utf-8", "replace")) for text in texts]


class FileTokenizer:
    """A tokenizer.json. Special tokens as its own post-processor adds them; its truncation and padding are off."""

    def __init__(self, path: Path) -> None:
        library = require("tokenizers", f"the tokenizer file {path}")
        content = reading.read_bytes(path, _MOST_BYTES, f"the tokenizer {shorten(str(path))}", _DO)
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception on a malformed file
            do = "give a tokenizer.json of the `tokenizers` library"
            raise EvenloadError(f"{path} is not a tokenizer file", shorten(str(error)), do) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = hashlib.blake2b(content, digest_size=16).hexdigest()
        # Ids may have gaps, so the largest id counts and not the number of entries.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._tokenizer.encode(_encodable(text)).ids, dtype=np.int64)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(e.ids) for e in self._tokenizer.encode_batch([_encodable(text) for text in texts])]


def open_tokenizer(spec: str) -> Tokenizer:
    """``bytes`` or the path of a tokenizer.json; raises `EvenloadError` for anything else."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(spec))
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    if not reading.is_file(path):
        raise EvenloadError(f"there is no tokenizer {shown(spec)}", f"{shorten(str(path))} is not a file", _DO)
    return FileTokenizer(path)


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
