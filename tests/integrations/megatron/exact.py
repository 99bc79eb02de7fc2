"""What a test asks of the errors that the ranks found, on a layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness import proof


def exact(results: list[Any], layout: dict[str, Any], lengths: Sequence[int] = proof.LENGTHS) -> None:
    """All plans gave the reference, and the ranks together ran every token's backward once; see `proof.exact`."""
    proof.exact(results, lengths=lengths, copies=layout.get("parallel__tp", 1) * layout.get("parallel__pp", 1))


def as_stock(results: list[Any], holds: Iterable[str], grad: float = 1e-9, loss: float = 1e-7) -> None:
    """Of `user_jobs.user_plans`: each rank has the gradients and losses of the stock loop, and its plans hold what they
    are to prove. Losses of tokens are float32."""
    for rank in results:
        for found in rank:
            assert "error" not in found, found
            assert found["grad"] < grad, found
            assert found["loss"] < loss, found
        for name in holds:
            assert any(found[name] for found in rank[:-1]), name
