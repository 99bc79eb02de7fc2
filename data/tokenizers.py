"""Tokenizers: `bytes`, a file that the `tokenizers` library wrote (tokenizer.json), or a Hugging Face folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError, shorten, shown
from ..core.input import reading
from .cache import cached_arrays
from .documents import require

_DO = "give `bytes`, the path of a tokenizer.json, or a folder with one"
_MEND = "mend its tokenizer.json, whose patterns have no end on this text, or the text"
_MOST_BYTES = 1 << 30
"""Of a tokenizer.json; those of vocabularies of 256 thousand take 40 MB."""
_SETTINGS = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""Files of a folder that `transformers` alone understands."""
_OF_FOLDER = ("tokenizer.json", *_SETTINGS, "special_tokens_map.json", "added_tokens.json", "config.json")
_NO_WARNING = 1 << 62
"""Tokens from which `transformers` would warn: samples are cut elsewhere."""


class Tokenizer(Protocol):
    """What turns text into token ids."""

    identity: str
    """Tells two tokenizers apart, for caches of what was made with them."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""

    @property
    def eos(self) -> str | None:
        """What ends a whole text; None where nobody says."""

    @property
    def end_token(self) -> int | None:
        """The token id of `eos`; None where nobody says."""

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Token ids of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids, int64 [length], of one text."""
        return np.array(self.encode_all([text])[0], dtype=np.int64)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text."""
        return [len(ids) for ids in self.encode_all(texts)]


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text, 0 .. 255; no special tokens. A lone surrogate counts as one '?'."""

    identity = "bytes"
    vocab_size = 256
    eos = end_token = None

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [list(text.encode("utf-8", "replace")) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(text.encode("utf-8", "replace")) for text in texts]


class FileTokenizer(Tokenizer):
    """A tokenizer.json. Special tokens as its own post-processor adds them; its truncation and padding are off."""

    eos = end_token = None

    def __init__(self, path: Path) -> None:
        library = require("tokenizers", f"the tokenizer file {path}")
        content = reading.read_bytes(path, _MOST_BYTES, f"the tokenizer {shorten(str(path))}", _DO)
        with _failures(f"{path} is not a tokenizer file", "give a tokenizer.json of the `tokenizers` library"):
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = hashlib.blake2b(content, digest_size=16).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        return _vocab_size(self._tokenizer)

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return _ids(self._tokenizer, texts)

    def decode(self, tokens: Sequence[int]) -> str:
        return _text(self._tokenizer, tokens)


class FolderTokenizer(Tokenizer):
    """A folder that `transformers` opens: special tokens, end of sequence and chat template are as its files say.

    It is opened when the first text is tokenised: that takes seconds, and lengths may be known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        digest = hashlib.blake2b(_release().encode(), digest_size=16)
        for name in _OF_FOLDER:
            if os.path.exists(folder / name):
                content = reading.read_bytes(folder / name, _MOST_BYTES, f"{shorten(str(folder))}/{name}", _DO)
                digest.update(f"{name} {len(content)}\0".encode() + content)
        self.identity = digest.hexdigest()

    @cached_property
    def hub(self) -> Any:
        """The tokenizer of `transformers`. Raises EvenloadError for a folder that it refuses."""
        library = require("transformers", f"the tokenizer {self.folder}")
        do = "give the folder that save_pretrained of a fast tokenizer wrote"
        with _failures(f"{self.folder} holds no tokenizer", do):
            offline = {"local_files_only": True, "trust_remote_code": False}
            hub = library.AutoTokenizer.from_pretrained(str(self.folder), **offline)
            hub.backend_tokenizer.no_truncation()
            hub.backend_tokenizer.no_padding()
        hub.model_max_length = _NO_WARNING
        return hub

    @cached_property
    def vocab_size(self) -> int:
        def build() -> dict[str, NDArray[np.int64]]:
            return {"vocab_size": np.array([_vocab_size(self.hub.backend_tokenizer)], dtype=np.int64)}

        return int(cached_arrays(f"tokenizer-{self.identity}", build)["vocab_size"][0])

    @property
    def eos(self) -> str | None:
        return self.hub.eos_token  # type: ignore[no-any-return]

    @property
    def end_token(self) -> int | None:
        return self.hub.eos_token_id  # type: ignore[no-any-return]

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return _ids(self.hub.backend_tokenizer, texts)

    def decode(self, tokens: Sequence[int]) -> str:
        return _text(self.hub.backend_tokenizer, tokens)

    def marked(self, text: str) -> Any:
        """``ids`` of a text as it stands, without further special tokens, and the ``offsets`` of each in the text."""
        with _failures(f"the tokenizer {shorten(str(self.folder))} fails on a text", _MEND):
            return self.hub.backend_tokenizer.encode(_encodable(text), add_special_tokens=False)


class EndingTokenizer(Tokenizer):
    """A tokenizer that puts its end of sequence after texts that do not end with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.identity = f"{tokenizer.identity} ending"

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def eos(self) -> str | None:
        return end_of(self._tokenizer, append=True)

    @property
    def end_token(self) -> int | None:
        return self._tokenizer.end_token

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return self._tokenizer.encode_all([with_end(text, self.eos) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


def end_of(tokenizer: Tokenizer, append: bool | None) -> str | None:
    """The end of sequence that is put after a text; None for none. ``append``: whether; None: where there is one.

    Raises EvenloadError where one is asked for that the tokenizer lacks.
    """
    eos = tokenizer.eos if append is not False else None
    if append and eos is None:
        do = "give a tokenizer folder whose tokenizer_config.json names eos_token, or set data.append_eos=false"
        raise EvenloadError("data.append_eos needs an end of sequence", "a tokenizer without eos_token", do)
    return eos


def with_end(text: str, eos: str | None) -> str:
    """The text with the end of sequence after it, once."""
    return text if eos is None or text.endswith(eos) else text + eos


def open_tokenizer(spec: str) -> Tokenizer:
    """``bytes``, the path of a tokenizer.json or a folder; raises `EvenloadError` for anything else."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        if any(reading.is_file(path / name) for name in _SETTINGS):
            return FolderTokenizer(path)
        path = path / "tokenizer.json"
    if not reading.is_file(path):
        raise EvenloadError(f"there is no tokenizer {shown(spec)}", f"{shorten(str(path))} is not a file", _DO)
    return FileTokenizer(path)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer besides whatever else it has."""
    return any(reading.is_file(folder / name) for name in ("tokenizer.json", _SETTINGS[0]))


def _vocab_size(tokenizer: Any) -> int:
    """Ids may have gaps, so the largest id counts and not the number of entries."""
    return 1 + max(tokenizer.get_vocab().values(), default=0)


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[Sequence[int]]:
    with _failures("the tokenizer fails on a text", _MEND):
        return [encoding.ids for encoding in tokenizer.encode_batch([_encodable(text) for text in texts])]


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    with _failures("the tokenizer fails on tokens", _MEND):
        return tokenizer.decode(list(tokens), skip_special_tokens=True)  # type: ignore[no-any-return]


@contextmanager
def _failures(what: str, do: str) -> Iterator[None]:
    """What the libraries raise on a user's files, as an EvenloadError; a panic of theirs is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise EvenloadError(what, shorten(str(error)), do) from error
        raise


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _release() -> str:
    """The release of `transformers`, by which a folder's tokenizer may differ."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
