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
    numbers = {"prompts": result["prompts"], "samples": result["samples"], "made before": result["samples_before"]}
    numbers |= {f"ended by {how}": number for how, number in sorted(result["ended"].items())}
    numbers |= _collected(result["collected"]) if result["collected"] else {}
    rows = [*numbers.items(), ("new tokens", result["tokens"]), ("time", seconds(result["seconds"]))]
    return grid(result["out"], ("of this run", "number"), rows, f"run {result['run']}")


def _collected(row: Result) -> Result:
    """What is kept of the samples that this command has drawn, beside all of them."""
    lines: Result = {
        "drawn now, pruned, left": f"{row['kept'] + row['pruned'] + row['left']}, {row['pruned']}, {row['left']}",
        "tokens of one, kept and all (estimated)": f"{row['kept_tokens']:.1f}, {row['mean_tokens']:.1f}",
        "tokens drawn, of all samples (estimated)": f"{row['tokens']:,}, {row['tokens_of_all']:,.0f}",
    }
    if row["kept_score"] is not None:
        lines["score, kept and all (last ones)"] = f"{row['kept_score']:.3f}, {row['mean_score']:.3f}"
    return lines
