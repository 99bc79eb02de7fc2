"""Files that `export` and `generate` have written."""

from __future__ import annotations

from rich.table import Table

from ...core.input.format import mib, seconds
from .show import Result, grid


def table(result: Result) -> Table:
    rows = [(name, mib(size)) for name, size in result["files"].items()]
    caption = f"{result['tensors']} tensors, {mib(result['bytes'])} in {seconds(result['seconds'])}"
    return grid(f"{result['folder']}, of step {result['step']}", ("file", "size"), rows, caption)


def table_of_samples(result: Result) -> Table:
    rows = [(how, number) for how, number in sorted(result["ended"].items())]
    new = result["samples"] - result["samples_before"]
    caption = f"{new} new samples, {result['tokens']} tokens in {seconds(result['seconds'])}"
    title = f"{result['out']}: {result['samples']} samples of {result['prompts']} prompts"
    return grid(title, ("ended by", "samples"), rows, caption)
