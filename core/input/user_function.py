"""A function of the user's own, which a recipe names by ``module:name``, and the numbers that it gives."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..errors import EvenloadError, RankError, shorten, shown


def user_function(word: str, key: str) -> Callable[..., Any]:
    """What ``module:name`` stands for, in the working folder or among installed packages; ``key`` of a recipe says it.

    Importing it runs the user's module. Raises EvenloadError.
    """
    module, _, name = word.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # and stays, for what its functions import later
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever the user's module raises
        do = "name module:function; the module is looked for in the working folder and among installed packages"
        detail = shorten(f"{word}: {type(error).__name__}: {error}")
        raise EvenloadError(f"{key} cannot be imported", detail, do) from error
    if not callable(value):
        raise EvenloadError(f"{key} names no function", f"{word} is {shown(value)}", "name a function")
    return value  # type: ignore[no-any-return]


def scored_by(
    function: Callable[..., Any], key: str, number: int, arguments: tuple[str, str, Any], *, share: bool = False
) -> float:
    """A function's score of a sample of prompt ``number`` from the texts of both and the prompt's line; with ``share``
    it is from 0 to 1. Raises RankError, which names the prompt."""
    prompt, text, row = arguments
    detail, do = f"prompt: {shown(prompt)}; sample: {shown(text)}", "mend the function; the same command goes on"
    try:
        value = function(prompt, text, dict(row))
    except Exception as error:  # whatever the user's function raises
        what = f"{key} raised {type(error).__name__} for a sample of prompt {number}: {shorten(str(error))}"
        raise RankError(what, detail, do) from error
    wanted = "a number from 0 to 1" if share else "a finite number"
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several
        score = math.nan
    if not math.isfinite(score) or (share and not 0 <= score <= 1):
        raise RankError(f"{key} gave {shown(value)} for a sample of prompt {number}, not {wanted}", detail, do)
    return score
