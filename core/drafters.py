"""Drafters of a generation (`runtime.generate.request.Drafter`), a row each; `generate.drafts.by` names one.

The function of a row takes the section `generate.drafts`, and gives what makes a drafter of earlier samples: a pure
function on every rank.
"""

from __future__ import annotations

from typing import Any

from .errors import nearest, refuse_first, shown
from .function_rows import FunctionRow, FunctionRows
from .recipe.generated import DraftRule

DRAFTERS = FunctionRows("drafter", FunctionRow)


def drafter_of(rule: DraftRule | None) -> Any:
    """What makes the drafter that a recipe asks for, None where it asks for none. Raises EvenloadError for a name that
    nobody has registered."""
    if rule is None:
        return None
    DRAFTERS.load_entry_points()
    rows = DRAFTERS.registered()
    refuse_first((rule.by not in rows, "generate.drafts.by names no drafter", shown(rule.by), nearest(rule.by, rows)))
    return DRAFTERS.imported(rows[rule.by])(rule)
