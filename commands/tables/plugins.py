"""The registered plugins."""

from __future__ import annotations

from rich.table import Table

from .show import Result, grid


def table(result: Result) -> Table:
    rows = [(p["name"], p["summary"], "; ".join(p["papers"]), p["origin"]) for p in result["plugins"]]
    return grid("plugins", ("name", "what it does", "papers", "from"), rows)
