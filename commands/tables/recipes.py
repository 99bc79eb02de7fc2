"""The recipes that come with evenload."""

from __future__ import annotations

from rich.table import Table

from .show import Result, grid


def table(result: Result) -> Table:
    rows = [(r["name"], r["trainer"], str(r["ranks"]), ", ".join(r["plugins"])) for r in result["recipes"]]
    return grid("recipes", ("name", "trainer", "ranks at least", "plugins"), rows, "every command takes these names")
