"""Which documents a spec means: the built-in sets, JSON Lines, Megatron's pair, arrow and parquet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..core.errors import shorten
from ..core.input import reading
from . import stdlib
from .arrow import ArrowDocuments
from .bin_idx import BinIdxDocuments
from .documents import Documents
from .jsonl import JsonlDocuments
from .locate import nothing_there, table_files
from .parquet import parquet_as_arrow
from .rows import docstrings
from .rows.chats import ChatEncoder
from .rows.documents import RowDocuments
from .rows.encoder import Encoder
from .rows.kinds import RowForm, row_form
from .rows.labels import LabelEncoder
from .rows.prompts import PromptEncoder
from .rows.readers import ArrowRows, JsonlRows, column_kinds, first_kinds
from .tokenizers import EndingTokenizer, Tokenizer


class Settings(NamedTuple):
    """How text and targets of rows are read."""

    tokenizer: Tokenizer
    text_key: str
    append_eos: bool | None
    """Whether texts end with the end of sequence; None: completions do, plain text does not."""
    all_tokens: bool
    """Whether prompts carry loss too."""

    @property
    def of_text(self) -> Tokenizer:
        """The tokenizer of plain text."""
        return EndingTokenizer(self.tokenizer) if self.append_eos else self.tokenizer


def open_documents(spec: str, settings: Settings) -> Documents:
    """The documents of a spec. Raises EvenloadError where there are none."""
    if spec == stdlib.NAME and settings.of_text.identity == "bytes":
        return stdlib.StdlibDocuments()
    if spec == stdlib.NAME:
        return _jsonl(stdlib.as_jsonl(), settings, spec)
    if docstrings.is_pairs(spec):
        return _jsonl(docstrings.as_jsonl(spec), settings, spec)
    path = Path(os.path.expanduser(spec))
    if reading.is_file(path) and path.suffix == ".jsonl":
        return _jsonl(path, settings)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if reading.is_file(f"{prefix}.idx") or path.suffix in (".bin", ".idx"):
        return BinIdxDocuments(prefix)
    files = table_files(path)
    if not files:
        raise nothing_there(spec, path)
    return _tables(spec, files, settings)


def _jsonl(path: Path, settings: Settings, name: str | None = None) -> Documents:
    form = row_form(first_kinds(path), settings.text_key, name or shorten(str(path)))
    if form.kind == "plain":
        return JsonlDocuments(path, settings.of_text, form.field, name)
    return RowDocuments(JsonlRows(path, name), _encoder(form, settings))


def _tables(spec: str, files: list[Path], settings: Settings) -> Documents:
    form = row_form(column_kinds(files[0]), settings.text_key, str(files[0]))
    encoder = None if form.kind == "plain" else _encoder(form, settings)
    names = encoder.fields if encoder else (form.field,)
    if files[0].suffix == ".parquet":
        files = [parquet_as_arrow(files, names)]
    if encoder is None:
        return ArrowDocuments(spec, files, settings.of_text, form.field)
    return RowDocuments(ArrowRows(spec, files, names), encoder)


def _encoder(form: RowForm, settings: Settings) -> Encoder:
    if form.kind == "labels":
        return LabelEncoder(form.field)
    if form.kind == "chats":
        return ChatEncoder(settings.tokenizer, form.field, all_tokens=settings.all_tokens)
    return PromptEncoder(settings.tokenizer, append_eos=settings.append_eos, all_tokens=settings.all_tokens)
