"""How tables say that a loss is of attention which left blocks of keys out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.sparse_error import SparseError


def word_of(error: Mapping[str, Any] | None) -> str:
    """What stands after a loss."""
    return " (sparse)" if error and not error["dense"] else ""


def said_of(error: Mapping[str, Any] | None) -> str:
    """What stands below a table of it: a line of its own."""
    return f"\n{SparseError(**error).text}" if error else ""
