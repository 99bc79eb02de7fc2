"""Tenants and sweeps as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from ...core.input.format import clock
from .show import Columns, by_columns, column, grid

_TENANT: Columns = {
    "tenant": column("name"),
    "state": column("state"),
    "step": lambda row: f"{row['step']:,} of {row['steps']:,}",
    "loss": column("loss"),
    "best": column("best"),
    "at step": lambda row: None if row["best"] is None else row["best_step"],
    "tokens": column("tokens", "{:,}".format),
    "time left": column("left_s", lambda left_s: "" if left_s is None else clock(left_s)),
}


def table(result: dict[str, Any]) -> Group:
    """A row a tenant, then a table a sweep with its winner bold; of ``tenants`` and ``sweeps`` of a result. Of a run,
    what it came to as well."""
    run = [_run(result["summary"], result["refused"])] if "summary" in result else []
    return Group(_tenants(result["tenants"]), *(_ranking(ranking) for ranking in result["sweeps"]), *run)


def _run(summary: dict[str, Any], refused: dict[str, str]) -> Table:
    rates: list[tuple[str, Any]] = [
        ("tokens, of them targets", f"{summary['tokens']:,}, {summary['targets']:,}"),
        ("time in steps", clock(summary["train_s"])),
        ("tokens/s", summary["tokens_per_s"]),
    ]
    rows: list[tuple[str, Any]] = [
        ("steps", f"{summary['steps']:,}"),
        *(rates if summary["steps"] else ()),
        ("last checkpoint", summary["checkpoint"] or "none: checkpoint.dir is null"),
        ("adapters", summary["out"]),
    ]
    caption = "\n".join(f"{name} was left out: {error}" for name, error in refused.items())
    return grid("summary", ("", ""), rows, caption)


def _tenants(statuses: list[dict[str, Any]]) -> Table:
    tokens = sum(row["tokens"] for row in statuses)
    about = [f"{tokens:,} tokens trained; loss: of the last step; best: the lowest loss of held-out samples"]
    about += [f"{row['name']}: {row['reason']}" for row in statuses if row["reason"]]
    return by_columns("tenants", _TENANT, statuses, "\n".join(about))


def _ranking(ranking: dict[str, Any]) -> Table:
    rows = [
        (str(place), row["trial"], row["state"], f"{row['step']:,} of {row['steps']:,}", row["loss"])
        for place, row in enumerate(ranking["trials"], 1)
    ]
    caption = f"loss: {ranking['loss_is']}"
    caption += (
        f"\nthe adapter of {ranking['winner']} is in {ranking['best']}" if ranking["best"] else "\nstill going on"
    )
    head = ("place", "trial", "state", "step", "loss")
    return grid(f"sweep {ranking['sweep']}", head, rows, caption, bold=0 if ranking["best"] else None)
