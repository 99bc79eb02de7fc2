"""Tenants as tables: how they stand, what a run came to, what a plan says of them, and what was proven."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group

from ...commands.tables.show import Columns, column, error, grid
from ...core.input.format import clock, percent, seconds
from ...core.verbs import ResultTable

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
_REPLICA: Columns = {
    "replica": column("replica"),
    "shape": lambda row: ", ".join(f"{key} {row[key]}" for key in ("tp", "pp", "dp")),
    "cluster": column("cluster"),
    "sequences": column("sequences", "{:,}".format),
    "tokens": column("tokens", "{:,}".format),
    "busy": column("busy_s", seconds),
    "of the steps": column("busy_frac", percent),
    "predicted": column("predicted_s", seconds),
}
_PLANNED: Columns = {
    "tenant": column("name"),
    "samples": column("samples", "{:.4g}".format),
    "tokens": column("tokens", "{:,.0f}".format),
    "share of the step": column("share", percent),
    "alone": column("alone_s", seconds),
    "adapter": column("adapter_weights", "{:,} weights".format),
}
_PROVEN: Columns = {
    "tenant": column("name"),
    "rank": column("r"),
    "steps": column("steps"),
    "loss": column("loss_rel_err", error),
    "gradients": column("grad_rel_err", error),
    "after updates": column("update_rel_err", error),
    "verdict": column("exact", lambda exact: "exact" if exact else "NOT exact"),
}


def table(result: dict[str, Any]) -> Group:
    """All that `evenload lora` shows of its result."""
    return Group(*(grid(*one) for one in standing(result)))


def standing(result: dict[str, Any]) -> list[ResultTable]:
    """A row a tenant, then a table a sweep with its winner bold."""
    statuses = result["tenants"]
    tokens = sum(row["tokens"] for row in statuses)
    about = [f"{tokens:,} tokens trained; loss: of the last step; best: the lowest loss of held-out samples"]
    about += [f"{row['name']}: {row['reason']}" for row in statuses if row["reason"]]
    return [_by_columns("tenants", _TENANT, statuses, about), *map(_ranking, result["sweeps"])]


def trained(result: dict[str, Any]) -> list[ResultTable]:
    """How the tenants of a run of `train` stand, and what it came to."""
    summary = result["summary"]
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
    caption = "\n".join(f"{name} was left out: {why}" for name, why in result["refused"].items())
    about = ["busy: in passes, of each step the busiest rank; predicted: of whole steps, by the replica's plans"]
    several = result.get("replicas")
    replicas = [_by_columns("replicas", _REPLICA, several, about)] if several else []
    return [*standing(result), *replicas, ResultTable("summary", ("", ""), rows, caption)]


def planned(result: dict[str, Any]) -> list[ResultTable]:
    """A row a tenant: means of the steps of `plan` that it takes part in."""
    tenants = result["tenants"]
    alone_s, together_s = tenants["one_after_another_s"], tenants["together_s"]
    about = [
        "predicted; alone: the step that a tenant would take by itself on all ranks",
        f"together {seconds(together_s)}, one after another {seconds(alone_s)} on the same ranks, each planned as well:"
        f" {tenants['saving']:.2f}x",
    ]
    if tenants["saving_at_most"] is not None:
        most = f"{tenants['saving_at_most']:.2f}x at most"
        about.append(f"the certified bound of all together is {seconds(tenants['bound_s'])}: {most}")
    return [_by_columns("tenants", _PLANNED, tenants["tenants"], about)]


def proven(result: dict[str, Any]) -> list[ResultTable]:
    """A row a tenant, as `verify` compared it."""
    return [_by_columns("each tenant against it alone", _PROVEN, result["tenants"])]


def _by_columns(title: str, columns: Columns, rows: Iterable[Any], about: Iterable[str] = ()) -> ResultTable:
    return ResultTable(
        title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], "\n".join(about)
    )


def _ranking(ranking: dict[str, Any]) -> ResultTable:
    rows = [
        (str(place), row["trial"], row["state"], f"{row['step']:,} of {row['steps']:,}", row["loss"])
        for place, row in enumerate(ranking["trials"], 1)
    ]
    caption = f"loss: {ranking['loss_is']}"
    caption += (
        f"\nthe adapter of {ranking['winner']} is in {ranking['best']}" if ranking["best"] else "\nstill going on"
    )
    head = ("place", "trial", "state", "step", "loss")
    return ResultTable(f"sweep {ranking['sweep']}", head, rows, caption, bold=0 if ranking["best"] else None)
