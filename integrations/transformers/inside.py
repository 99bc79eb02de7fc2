"""Whether a Trainer is at work: what it takes from Accelerate is planned by its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

_depth: list[None] = []
"""One entry for each method of a Trainer that runs."""
_accelerators: WeakSet[Any] = WeakSet()
"""Of Trainers."""


def is_inside(accelerator: Any) -> bool:
    """Whether a Trainer takes batches or runs one right now, or an Accelerator is a Trainer's."""
    return is_running() or accelerator in _accelerators


def is_running() -> bool:
    """Whether a method of a Trainer runs right now."""
    return bool(_depth)


@contextmanager
def inside(accelerator: Any) -> Iterator[None]:
    """Around a method of the Trainer of an Accelerator."""
    _accelerators.add(accelerator)
    _depth.append(None)
    try:
        yield
    finally:
        _depth.pop()
