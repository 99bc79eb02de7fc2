"""Data sets and tokenizers as files, as small as tests want them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def jsonl(path: Path, rows: Iterable[Any]) -> str:
    """A line for each row; a row that is text stands as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def table(folder: Path, kind: str, rows: Any) -> str:
    """What `datasets` writes of rows, or of a data set: a folder of arrow files, or a parquet file."""
    data = pytest.importorskip("datasets").Dataset.from_list(rows) if isinstance(rows, list) else rows
    path = folder / {"arrow": "saved", "parquet": "a.parquet"}[kind]
    data.save_to_disk(path) if kind == "arrow" else data.to_parquet(path)
    return str(path)


def tokenizer(folder: Path, words: dict[str, int], unknown: str = "?", begin: str = "", **more: Any) -> Path:
    """The file of a tokenizer of words with ``begin`` before a text; ``more``: its methods and their arguments."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if begin:
        special = [(begin, words[begin])]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    for name, argument in more.items():
        getattr(made, name)(**argument)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
