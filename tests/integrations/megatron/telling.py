"""What evenload says of what it refuses, and where faults are planted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from evenload.core.errors import EvenloadError


def told(act: Callable[[], Any], inside: AbstractContextManager[Any] | None = None) -> str:
    """The error of an act, or of entering what it is done inside; "": there is none."""
    try:
        with inside or nullcontext():
            act()
    except EvenloadError as error:
        return str(error)
    return ""


def planted(faults: dict[str, Callable[[], AbstractContextManager[Any]]], name: str) -> AbstractContextManager[Any]:
    """The fault of this name is planted inside; "": none."""
    return faults[name]() if name else nullcontext()
