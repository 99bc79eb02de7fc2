"""Files that `export` has written."""

from __future__ import annotations

from rich.table import Table

from ...core.input.format import mib, seconds
from .show import Result, grid


def table(result: Result) -> Table:
    rows = [(name, mib(size)) for name, size in result["files"].items()]
    caption = f"{result['tensors']} tensors, {mib(result['bytes'])} in {seconds(result['seconds'])}"
    return grid(f"{result['folder']}, of step {result['step']}", ("file", "size"), rows, caption)
