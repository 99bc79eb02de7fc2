"""What a test asks of the errors that the ranks found: see `slice_jobs.errors_of_plans`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact(results: list[Any], layout: dict[str, Any], lengths: Sequence[int]) -> None:
    """All plans gave the reference, and the ranks together ran every token's backward once."""
    copies = layout.get("parallel__tp", 1) * layout.get("parallel__pp", 1)
    for plans in zip(*results, strict=True):
        for found in plans:
            assert found.get("error") is None, found
            assert found["loss"] < 1e-12, found["plan"]
            assert found["grad"] < 1e-9, found["plan"]
            assert found["miscounted"] == 0
        ran = [(s.sequence, t) for found in plans for s in found["executed"] for t in range(s.start, s.stop)]
        assert sorted(ran) == sorted((i, t) for i, n in enumerate(lengths) for t in range(n) for _ in range(copies))


def is_caught(plans: Sequence[Any]) -> bool:
    """Whether some rank found a planted fault in its results of a plan, or was told of it."""
    return any(found.get("error") or found["grad"] > 1e-4 or found["loss"] > 1e-4 for found in plans)
