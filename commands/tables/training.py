"""What a run of `train` came to, as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ...core.input.format import clock, percent
from .show import grid


def table(result: dict[str, Any]) -> Table:
    """The table of `metrics.totals`; without rates for a run that was done already."""
    if not result["steps"]:
        said = "no step was left to train: raise train.steps to train on"
        return grid("summary", ("", ""), [("steps", "0"), ("last checkpoint", result["checkpoint"] or "none")], said)
    rows: list[tuple[str, Any]] = [
        ("steps", f"{result['steps']:,}"),
        ("tokens, of them targets", f"{result['tokens']:,}, {result['targets']:,}"),
        ("time in steps", clock(result["train_s"])),
        ("tokens/s", result["tokens_per_s"]),
        ("MFU at the cluster's rate", percent(result["mfu"])),
        ("last checkpoint", result["checkpoint"] or "none: checkpoint.dir is null"),
    ]
    losses = f"{result['loss']:.4f}, {result['best_loss']:.4f} in step {result['best_step']}"
    rows.insert(5, ("loss of the last step, and lowest", losses))
    return grid("summary", ("", ""), rows)
