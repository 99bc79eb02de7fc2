"""Whether a Trainer is at work: what it takes from Accelerate is planned by its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth: list[None] = []
"""One entry for each method of a Trainer that runs."""


def is_inside() -> bool:
    """Whether a Trainer takes batches or runs one right now."""
    return bool(_depth)


@contextmanager
def inside() -> Iterator[None]:
    """Around a method of a Trainer."""
    _depth.append(None)
    try:
        yield
    finally:
        _depth.pop()
