"""What several scorers, cheap to dear, came to (`core.cascade`)."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cascade import SEEN
from ...core.input.format import percent, seconds
from ...training.sampling.figures import score_of


def lines_of(row: Mapping[str, float]) -> list[tuple[str, str]]:
    """Who scored how many, in which seconds, and the mean with what it cannot see; none of one scorer."""
    numbers = [name.removeprefix("scored_") for name in row if name.startswith("scored_")]
    lines = [
        (
            f"scorer {number}: samples, time, of the busiest rank",
            f"{row[f'scored_{number}']:,}, {seconds(row[f'scorer_{number}_s'])}, "
            f"{seconds(row[f'scorer_{number}_busiest_s'])}",
        )
        for number in numbers
    ]
    if "score_low" in row:
        lines.append(("mean of the last scorer; uncorrected", f"{score_of(row)}; {row['score_uncorrected']:.3f}"))
        what = f"chance that errors in {percent(SEEN)} of samples were missed by {row['rescored']} rescored ones"
        lines.append((what, percent(row["missed_frac"])))
    elif numbers:
        lines.append(("mean, uncorrected", score_of(row)))
    return lines
