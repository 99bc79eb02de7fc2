"""Variants of `bench`, side by side."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from ...core.input.format import gib, percent
from .show import Columns, Result, by_columns, column, errors, machine
from .train import SPEEDUP, closing

_BENCHED: Columns = {
    "": column("name"),
    "tokens/s": column("tokens_per_s"),
    "imbalance": column("imbalance"),
    "padding": column("padding_frac", percent),
    "bubble": column("bubble_frac", percent),
    "holds": column("peak_activation_bytes", gib),
    "speedup": column("ratio", lambda ratio: f"{ratio['of_totals']:.3f}x" if ratio else ""),
    "quartiles of steps": column("ratio", lambda of: "{:.3f} .. {:.3f}".format(*of["quartiles"]) if of else ""),
    "its busiest rank": column("ratio", lambda ratio: f"{ratio['of_busiest']:.3f}x" if ratio else ""),
    "of its ceiling": column("ratio", lambda ratio: percent(ratio["of_ceiling"]) if ratio else ""),
}
_SPARE = ("quartiles of steps", "padding")
_BY_NAME = ("tokens_per_s", "imbalance", "padding_frac", "bubble_frac", "peak_activation_bytes")


def table(result: Result) -> Group:
    """A row a variant, then what the run showed."""
    return Group(_bench(result), *closing(result["ratio"], result["host"]))


def _bench(result: Result) -> Table:
    rows = [
        {"name": name, "ratio": result["ratio"].get(name), **{key: result[key][name] for key in _BY_NAME}}
        for name in result["tokens_per_s"]
    ]
    peaks_of = result["predicted_peak_activation_bytes_of_stages"]
    caption = (
        f"{result['steps']} steps, alternating, measured; planning took {percent(result['plan_share'])} of a step\n"
        f"{SPEEDUP}\n"
        "its busiest rank: compute of the baseline's over evenload's; ceiling: the baseline's own imbalance, what "
        "balance alone can gain (a smaller bubble comes on top)\n"
        f"{_paths(result)}predicted step times are off by {errors(result['prediction_error'])} on average\n"
        "bubble: share of the steps in which ranks wait for other ranks and stages, measured (predicted: "
        f"{errors(result['predicted_bubble_frac'])})\n"
        "holds: the most that passes of one step hold on any rank, above the level before it, measured (predicted: "
        f"{', '.join(f'{gib(max(peaks))} ({name})' for name, peaks in peaks_of.items())})"
    )
    return by_columns(f"bench on {machine(result)}", _BENCHED, rows, caption, spare=_SPARE)


def _paths(result: Result) -> str:
    if "critical_path" not in result:
        return ""
    words = [
        f"{name} {path['critical_s']:.3g} s, with even experts {path['evened_experts_s']:.3g} s"
        for name, path in result["critical_path"].items()
    ]
    return f"critical path through layers with experts, compute alone: {'; '.join(words)}\n"
