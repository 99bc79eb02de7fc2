"""Drafters of a generation (`runtime.generate.request.Drafter`), a row each; `generate.drafts.by` names one.

The function of a row takes the section `generate.drafts`, and gives what makes a drafter of earlier samples: a pure
function on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import nearest, refuse_first, shown
from .function_rows import FunctionRow, FunctionRows
from .recipe.generated import DraftRule
from .recipe.recipe import Recipe


@dataclass(frozen=True)
class DrafterRow(FunctionRow):
    """A drafter that a plugin, or another package, offers under a name."""

    unfit: str = ""
    """``module:function`` from a recipe to rules of what it cannot draft for; empty: there are none."""


DRAFTERS = FunctionRows("drafter", DrafterRow)


def drafter_of(rule: DraftRule | None, recipe: Recipe | None = None) -> Any:
    """What makes the drafter that a recipe asks for, None where it asks for none. Raises EvenloadError for a name that
    nobody has registered, and for a recipe that this drafter does not draft for."""
    if rule is None:
        return None
    DRAFTERS.load_entry_points()
    rows = DRAFTERS.registered()
    refuse_first((rule.by not in rows, "generate.drafts.by names no drafter", shown(rule.by), nearest(rule.by, rows)))
    row = rows[rule.by]
    if row.unfit and recipe is not None:
        refuse_first(*DRAFTERS.imported(row, row.unfit)(recipe))
    return DRAFTERS.imported(row)(rule)
