"""Combinations of `plan --sweep`, the best one marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ...core.input.format import gib, percent, seconds
from ...training.forecast.sweep import said, written
from .show import Columns, Result, column, grid


def degrees(sizes: Mapping[str, Any]) -> str:
    """Degrees of parallelism above 1, and layers by stage where they are unequal."""
    layers = sizes.get("layers", ())
    words = [f"{name}{size}" for name, size in sizes.items() if name != "layers" and size > 1]
    return " ".join(words + ["|".join(map(str, layers))] * bool(layers))


_COMBINATION: Columns = {
    "ranks": column("world_size", str),
    "layout": lambda row: (degrees(row["layout"]) or "dp1") + ("" if row.get("trains", True) else ": predicted only"),
    "step time": column("step_s", seconds),
    "tokens/s": column("tokens_per_s", "{:,.0f}".format),
    "a rank": column("tokens_per_s_per_rank"),
    "imbalance": column("imbalance", "{:.3f}".format),
    "bubble": column("bubble_frac", percent),
    "exposed": column("exposed_frac", percent),
    "holds": lambda row: gib(row["peak_bytes"]) + ("" if row["fits"] else ": too much"),
    "gain over": column("strongest_baseline", lambda baseline: "{name} {gain:.2f}x".format(**baseline)),
    "planning": column("plan_s", seconds),
}
_SPARE = ("layout", "exposed", "bubble", "planning")


def table(result: Result) -> Table:
    """A row a combination, the best one bold and with a star."""
    keys, best = result["keys"], result["best"]
    rows, reasons = [], []
    for place, row in enumerate(result["rows"]):
        if "error" in row:
            cells = ["", "impossible", *[""] * (len(_COMBINATION) - 2)]
            reasons.append(f"{said(row['settings'])}: {row['error']['what']} ({row['error']['found']})")
        else:
            cells = [cell(row) for cell in _COMBINATION.values()]
        rows.append(["*" if place == best else "", *(written(row["settings"][key]) for key in keys), *cells])
    marked = "*: most tokens/s a rank among those that fit and train" if best is not None else "none fits into memory"
    about = f"predicted, means of {result['steps']} step(s); {marked}; gain: over the fastest baseline of the row"
    ends = [key.split(".")[-1] for key in keys]
    heads = [end if ends.count(end) == 1 else key for end, key in zip(ends, keys, strict=True)]
    return grid(
        f"what if: {', '.join(keys)}", ["", *heads, *_COMBINATION], rows, "\n".join([about, *reasons]), best, _SPARE
    )
