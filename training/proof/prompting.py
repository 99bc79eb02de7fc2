"""What a proof of generation continues, and how: without torch, so that a command can look at it first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...data.prompt_file import Prompt
from ...runtime.generate.request import Generation

MOST_NEW = 24
"""Tokens of a sample, where its prompt does not say it."""


class Prompting(NamedTuple):
    """Prompts, and the rule by which samples are drawn and end."""

    settings: Generation
    limit: int
    """Tokens of a sample, where its prompt does not say it."""
    prompts: Sequence[Prompt] | None = None
    """None: beginnings of the recipe's data."""
