"""What is installed, what is supported, which attention kernels and patches are at hand. Works without torch."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

from ..core.errors import EvenloadError
from ._shared.hosts import TRAINERS


def doctor() -> dict[str, Any]:
    """Versions of all hosts, attention kernels (where torch is), and the state of every patch row."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "hosts": _hosts(),
        "attention": _attention(),
        "solver": _solver(),
        "patches": _patches(),
        "trainers": {name: all(need.satisfied() for need in needs) for name, needs in TRAINERS.items()},
    }


def _hosts() -> list[dict[str, Any]]:
    needs = {need.distribution: need for group in TRAINERS.values() for need in group}
    return [
        {
            "name": need.distribution,
            "found": need.installed(),
            "supports": str(need.supports),
            "status": "supported" if need.satisfied() else ("not supported" if need.installed() else "missing"),
        }
        for need in needs.values()
    ]


def _solver() -> list[dict[str, Any]]:
    """What `plugins.pipeline` solves its integer program with; without it, rules that are about as good."""
    status = {name: find_spec(module) is not None for name, module in (("PuLP", "pulp"), ("HiGHS", "highspy"))}
    return [{"name": name, "status": "available" if here else "not here"} for name, here in status.items()]


def _attention() -> list[dict[str, Any]]:
    if find_spec("torch") is None:
        return []
    from ..runtime.attention.kernels import KERNELS

    return [{"name": k.name, "status": "available" if k.available() else "not here"} for k in KERNELS]


def _patches() -> list[dict[str, Any]]:
    """Every patch row: whether it would be applied here, and why not. Imports no trainer."""
    from ..patches.row import check_version
    from ..patches.support import all_rows

    rows = []
    for row in all_rows():
        try:
            check_version(row)
            needed = row.when is None or (find_spec("torch") is not None and row.when())
            status = "applies" if needed else "not needed here"
        except EvenloadError as error:
            status = f"not applicable: {error.found}"
        rows.append({"name": row.name, "target": row.target, "supports": row.supports, "status": status})
    return rows
