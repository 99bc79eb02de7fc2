"""What the scripts of this folder share: sets of lengths, and who is ahead of evenload in a case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.chains import SEED
from evenload.benchmarks.frame import Row
from evenload.benchmarks.published.lengths import drawn
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.data.lengths import read_lengths

MOST_LINES = 60_000
"""Of a file of lengths."""
LONG_TAIL = "long tail (log-normal)"
"""After long prompts of conversations, an assumption: median 6,800 tokens, shape 1.1, up to 131,072."""


def sets_of(files: Iterable[str]) -> dict[str, Lengths]:
    """Lengths by name: the files, or a stand-in for Wikipedia where there are none, and a drawn long tail."""
    named = {Path(path).stem: read_lengths(Path(path))[:MOST_LINES] for path in files}
    if not named:
        named = {"wikipedia-like": as_lengths(drawn("wikipedia-like", MOST_LINES))}
    tail = np.random.default_rng(SEED).lognormal(np.log(6800), 1.1, MOST_LINES)
    return {**named, LONG_TAIL: as_lengths(tail.astype(np.int64).clip(16, 131_072))}


def case_result(asked: Any, cases: Sequence[list[Row]], key: str, *about: str) -> Row:
    """The rows of all cases, and in which of them a rule is below evenload in ``key`` by more than rounding.

    ``about``: what names a case.
    """
    behind = []
    for case in cases:
        ours = min(row[key] for row in case if row["name"].startswith("evenload"))
        if ahead := [row["name"] for row in case if row[key] < ours * (1 - 1e-6)]:
            behind.append({**{name: case[0][name] for name in about}, "ahead": ahead})
    settings = {name: value for name, value in vars(asked).items() if isinstance(value, int) and name != "json"}
    return {**settings, "rows": [row for case in cases for row in case], "behind": behind}


def who_is_ahead(result: Row) -> str:
    """Of evenload, case by case."""
    cases = [(", ".join(v for v in one.values() if isinstance(v, str)), one["ahead"]) for one in result["behind"]]
    return "; ".join(f"{case}: {', '.join(ahead)}" for case, ahead in cases) or "nobody"
