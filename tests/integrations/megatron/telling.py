"""What evenload says of what it refuses, and where faults are planted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from evenload.core.errors import EvenloadError
from evenload.core.recipe.carried import REQUIRE


def told(act: Callable[[], Any], inside: AbstractContextManager[Any] | None = None) -> str:
    """The error of an act, or of entering what it is done inside; "": there is none. Loops are asked for plans."""
    try:
        with required(), inside or nullcontext():
            act()
    except EvenloadError as error:
        return str(error)
    return ""


def required() -> AbstractContextManager[Any]:
    """Inside, a loop that cannot be planned ends, as under ``evenload run --require``."""
    return patch.dict(os.environ, {REQUIRE: "1"})


def planted(faults: dict[str, Callable[[], AbstractContextManager[Any]]], name: str) -> AbstractContextManager[Any]:
    """The fault of this name is planted inside; "": none."""
    return faults[name]() if name else nullcontext()
