"""Tenants of a plan as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ...training.shared_plan.rows import HEAD, rows, said
from .show import grid


def table(tenants: dict[str, Any]) -> Table:
    """A row a tenant: means of the steps that it takes part in."""
    about = ["predicted; alone: the step that a tenant would take by itself on all ranks", *said(tenants)]
    return grid("tenants", HEAD, rows(tenants), "\n".join(about))
