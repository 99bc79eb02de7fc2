"""The table of replayed loads."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ...core.input.format import mib, seconds
from .show import grid


def table(loads: dict[str, Any]) -> Table:
    """A row a planner, from the section ``loads`` of ``plan --json``."""
    head = (
        "",
        "busiest rank, p50",
        "p95",
        "most",
        "copies",
        "weights",
        "slots",
        "a layer",
        "for copies",
        "planning",
        "looks back",
    )
    rows = [
        (
            name,
            *(f"{row[f'imbalance_{part}']:.4f}" for part in ("p50", "p95", "max")),
            f"{row['copies']:.2f}",
            mib(row["copied_bytes"]),
            str(row["slots"]),
            *("-" if row[name] is None else seconds(1e-3 * row[name]) for name in ("layer_ms", "exposed_ms")),
            seconds(1e-3 * row["plan_ms_measured"]),
            f"{row['late_steps']} steps" if row["late_steps"] else "-",
        )
        for name, row in loads["planners"].items()
    ]
    recorded, steps = loads["recorded"], loads["steps"]
    about = [
        f"predicted, but for planning, from {loads['passes']:,} passes of steps {steps['first']} to {steps['last']}, "
        f"{len(loads['layers'])} layers each; recorded on {recorded['ranks']} ranks, ep {recorded['ep']}",
        "busiest rank: its tokens over those of the mean rank of a group; copies: of experts, on all of its ranks; "
        "weights: that they move forward",
        "a layer: its experts and exchanges, forward and backward, on the recipe's cluster; for copies: what of that "
        "their weights and gradients travel",
        "slots: the most copies of a rank; looks back: chooses copies from loads of steps before, but not the newest",
        *loads["notes"],
    ]
    return grid(f"experts, ep {loads['ep']}, loads of {loads['file']}", head, rows, "\n".join(about))
