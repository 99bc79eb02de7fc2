"""What is installed, what is supported, which attention kernels and patches are at hand, and what each plugin can do in
which training loop. Works without torch."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

from ..core.errors import EvenloadError
from ..core.recipe.recipe import Recipe
from ..core.recipe.traits import TRAINERS
from ..training.hosts import needs_of
from .installation.attention_paths import attention_paths
from .installation.training_loops import training_loops


def doctor(recipe: Recipe | None = None) -> dict[str, Any]:
    """Versions of all hosts, attention kernels (where torch is), the state of every patch row, and training loops.

    With a recipe: for its precision and model, and for the plugins that it enables.
    """
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "hosts": _hosts(),
        "attention": _attention(),
        "attention_paths": attention_paths(recipe),
        "loops": training_loops(recipe),
        "solver": _solver(),
        "patches": _patches(),
        "trainers": {name: all(need.satisfied() for need in needs_of(name)) for name in TRAINERS},
    }


def _hosts() -> list[dict[str, Any]]:
    rows = []
    for need in dict.fromkeys(need for name in TRAINERS for need in needs_of(name)):
        name, version = need.distribution, need.installed()
        status = "missing" if version is None else "supported" if need.satisfied() else "not supported"
        rows.append({"name": name, "found": version, "supports": str(need.supports), "status": status})
    return rows


def _solver() -> list[dict[str, Any]]:
    """What `plugins.pipeline` solves its integer program with; without it, rules that are about as good."""
    return [_at_hand("PuLP", find_spec("pulp") is not None), _at_hand("HiGHS", find_spec("highspy") is not None)]


def _attention() -> list[dict[str, Any]]:
    if find_spec("torch") is None:
        return []
    from ..runtime.attention.kernels import KERNELS

    return [_at_hand(kernel.name, kernel.available()) for kernel in KERNELS]


def _at_hand(name: str, here: bool) -> dict[str, Any]:
    return {"name": name, "status": "available" if here else "not here"}


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
