"""What a test asks of the errors that the ranks found, on a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import proof


def exact(results: list[Any], layout: dict[str, Any], lengths: Sequence[int] = proof.LENGTHS) -> None:
    """All plans gave the reference, and the ranks together ran every token's backward once; see `proof.exact`."""
    proof.exact(results, lengths=lengths, copies=layout.get("parallel__tp", 1) * layout.get("parallel__pp", 1))
