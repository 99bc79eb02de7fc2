"""Prompts to continue: ``{"prompt": ...}`` a line, which is text, token ids, or messages for the tokenizer's template.

A line may say its own ``max_new_tokens``, and the ``tenant`` whose adapter continues it. Its place in the file is the
prompt's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import EvenloadError, shorten, shown
from .jsonl import check_ids, read_objects
from .rows.chats import ChatTemplate, extras_of
from .rows.kinds import PROMPT, Placed, field_kind
from .tokenizers import Tokenizer

LIMIT, TENANT = "max_new_tokens", "tenant"


class Prompt(NamedTuple):
    """Token ids, how many may follow them, and by whose adapter."""

    tokens: tuple[int, ...]
    limit: int
    tenant: str = ""
    row: Mapping[str, Any] = {}
    """The whole line."""

    def text(self, tokenizer: Tokenizer) -> str:
        """What the line says as text, or the text of the tokens."""
        said = self.row.get(PROMPT)
        return said if isinstance(said, str) else tokenizer.decode(self.tokens)


def read_prompts(path: Path, tokenizer: Tokenizer, limit: int) -> list[Prompt]:
    """The prompts of a file; ``limit``: of those that have none. Raises EvenloadError, with the line, for one that
    cannot be read, and for a file without any."""
    prompts = [*_read(path, tokenizer, limit)]
    if not prompts:
        raise EvenloadError(f"{shorten(str(path))} has no prompt", "an empty file", 'write {"prompt": ...} on a line')
    return prompts


def _read(path: Path, tokenizer: Tokenizer, limit: int) -> Iterator[Prompt]:
    template = ChatTemplate(tokenizer)
    for place, _, row in read_objects(path):
        if PROMPT not in row:
            what, do = f"{place} has no prompt", 'write {"prompt": ...}: text, token ids, or messages'
            raise EvenloadError(what, f"fields {', '.join(row)}", do)
        own = row.get(LIMIT, limit)
        if type(own) is not int or own < 1:
            raise EvenloadError(f"{LIMIT} in {place} is not a number of tokens", shown(own), "give 1 or more")
        tenant = row.get(TENANT, "")
        if not isinstance(tenant, str):
            raise EvenloadError(f"{TENANT} in {place} is no name", shown(tenant), "give the name of a tenant, or none")
        yield Prompt(tuple(_tokens(row, tokenizer, template, place)), own, tenant, row)


def _tokens(row: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate, place: str) -> list[int]:
    value = row[PROMPT]
    if isinstance(value, str):
        return [int(token) for token in tokenizer.encode(value)]
    if field_kind(value) == "messages":
        return template.tokens(value, extras_of(Placed(place, row)), place, ask=True)
    return check_ids(value, PROMPT, place)
