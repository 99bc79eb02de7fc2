"""The tables of `evenload doctor`."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table

from .show import Result, grid

_KINDS = (("kernel", ""), ("parts", "_parts"))


def table(result: Result) -> Group:
    """What is installed; the kernels of attention, a row a path; plugins, a row a loop."""
    return Group(_installed(result), _paths(result), _loops(result))


def _installed(result: Result) -> Table:
    rows = [(r["name"], r["found"] or "not installed", r["supports"], r["status"]) for r in result["hosts"]]
    rows += [(f"{kind}: {r['name']}", "", "", r["status"]) for kind in ("attention", "solver") for r in result[kind]]
    groups = Counter((r["name"].partition(".")[0], r["supports"], r["status"]) for r in result["patches"])
    rows += [(f"patches: {name}", f"{count} rows", *more) for (name, *more), count in groups.items()]
    return grid("doctor", ("", "found", "supported", "status"), rows)


def _paths(result: Result) -> Table:
    rows = [(r["path"], r["kernel"] or "none", r["parts"] or "none") for r in result["attention_paths"]]
    reasons = [(r[key] or "none", r[f"why{more}"]) for key, more in _KINDS for r in result["attention_paths"]]
    caption = "\n".join(dict.fromkeys(f"{kernel}, because {why}" for kernel, why in reasons if why))
    return grid("attention", ("loop", "whole samples", "parts of samples"), rows, caption)


def _loops(result: Result) -> Table:
    names = [plugin["name"] for plugin in result["loops"][0]["plugins"]]
    rows = [(loop["name"], *(_cell(loop, plugin) for plugin in loop["plugins"])) for loop in result["loops"]]
    refused = [f"{loop['name']}: {loop['refused']}" for loop in result["loops"] if loop["refused"]]
    return grid("plugins by loop", ("loop", *names), rows, "\n".join(refused))


def _cell(loop: Result, plugin: Result) -> str:
    if loop["refused"]:
        return "refused"
    return "off" if plugin["enabled"] is False else str(plugin["does"])
