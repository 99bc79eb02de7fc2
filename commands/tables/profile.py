"""Coefficients and links that `profile` has measured."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from ...core.input.format import percent, seconds
from .show import Result, errors, grid, machine


def table(result: Result) -> Group:
    """Coefficients of the passes at every setting that was measured, then the links."""
    keys = {"launch_s": "s a launch", "token_s": "s a token", "expert_s": "s a token at experts"}
    keys["pair_s"] = "s a (query, key) pair"
    if not any(c["expert_s"] for c in result["passes"].values()):
        del keys["expert_s"]
    at_degrees = {f", TP {tp}": one for tp, one in result.get("by_tp", {}).items()} or {"": result}
    others = {f", sharding {sharding}": one for sharding, one in result.get("by_sharding", {}).items()}
    rows = [
        (name + at, *(f"{c[key]:.3g}" for key in keys), percent(one["fit_error"][name]))
        for at, one in (at_degrees | others).items()
        for name, c in one["passes"].items()
    ]
    head = ("", *keys.values(), "error of the fit")
    caption = (
        f"update: {seconds(result['update_s'])}; steps of {result['ranks']} rank(s), simulated with these costs, are "
        f"off by {percent(result['fit_error']['step'])} on average; written to {result['out']}"
    )
    passes = grid(f"costs of {machine(result)}", head, rows, caption)
    tables = [passes, *_decoding(result["decode"])]
    if not result["links"]:
        return Group(*tables)
    links = [
        (name, seconds(link["latency_s"]), f"{link['bytes_per_s'] / 1e9:.3g} GB/s", errors(link["fit_error"]))
        for name, link in result["links"].items()
    ]
    return Group(*tables, grid("links", ("", "latency", "bandwidth", "error of the fit"), links))


def _decoding(decode: Result | None) -> list[Table]:
    """What decode steps take, where they were measured."""
    if decode is None:
        return []
    head = ("a step", "a sample in it", "a key that is read", "a token of a prompt", "error of the fit")
    numbers = (f"{decode[key]:.3g} s" for key in ("step_s", "row_s", "key_s", "prompt_s"))
    return [grid("decode steps", head, [(*numbers, percent(decode["fit_error"]))])]
