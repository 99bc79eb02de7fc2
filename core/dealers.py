"""Dealers of a generation's samples to ranks (`runtime.generate.dealing.Dealer`), a row each; the first one deals.

The function of a row takes a recipe, and earlier samples of the same prompts, by which lengths are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .function_rows import FunctionRow, FunctionRows
from .recipe.recipe import Recipe

DEALERS = FunctionRows("dealer", FunctionRow)


def dealer_of(recipe: Recipe, earlier: Sequence[Any]) -> Any:
    """The dealer of samples that others are known of; None where nobody offers one: they are spread."""
    DEALERS.load_entry_points()
    row = next(iter(DEALERS.registered().values()), None)
    return row and DEALERS.imported(row)(recipe, earlier)
