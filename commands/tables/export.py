"""Files that `export`, `generate` and `score` have written."""

from __future__ import annotations

from rich.table import Table

from ...core.input.format import mib, seconds
from .show import Result, grid


def table(result: Result) -> Table:
    rows = [(name, mib(size)) for name, size in result["files"].items()]
    caption = f"{result['tensors']} tensors, {mib(result['bytes'])} in {seconds(result['seconds'])}"
    return grid(f"{result['folder']}, of step {result['step']}", ("file", "size"), rows, caption)


def table_of_samples(result: Result) -> Table:
    numbers = {"prompts": result["prompts"], "samples": result["samples"], "made before": result["samples_before"]}
    numbers |= {f"ended by {how}": number for how, number in sorted(result["ended"].items())}
    rows = [*numbers.items(), ("new tokens", result["tokens"]), ("time", seconds(result["seconds"]))]
    return grid(result["out"], ("of this run", "number"), rows, f"run {result['run']}")


def table_of_losses(result: Result) -> Table:
    rows = [(name, own["samples"], own["targets"], f"{own['loss']:.4f}") for name, own in result["domains"].items()]
    caption = f"{mib(result['bytes'])} in {seconds(result['seconds'])}"
    return grid(result["folder"], ("domain", "samples", "targets", "loss"), rows, caption)
