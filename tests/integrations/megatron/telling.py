"""What evenload says of what it refuses."""

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
