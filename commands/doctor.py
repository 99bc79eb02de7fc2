"""What is installed, what is supported, which attention kernels and patches are at hand, and what each plugin can do in
which training loop. Works without torch."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

from ..api import load_plugins
from ..core.errors import EvenloadError
from ..core.recipe.recipe import Recipe
from ..core.recipe.traits import TRAINERS, TRANSFORMER_ENGINE, Loop, all_loops
from ..core.registry import Plugin, SlicePlugin, registered
from ..training.hosts import needs_of, require

_WHOLE = "samples stay whole there"
_SOLVER = {"pulp": "PuLP", "highspy": "HiGHS"}
"""What `plugins.pipeline` solves its integer program with; without it, rules that are about as good."""


def doctor(recipe: Recipe | None = None) -> dict[str, Any]:
    """Versions of all hosts, attention kernels (where torch is), the state of every patch row, and training loops.

    With a recipe: for its precision and model, and for the plugins that it enables.
    """
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "hosts": _hosts(),
        "attention": _attention(),
        "attention_paths": _attention_paths(recipe),
        "loops": [_loop(loop, recipe) for loop in all_loops()],
        "solver": [_at_hand(name, find_spec(module) is not None) for module, name in _SOLVER.items()],
        "patches": _patches(),
        "trainers": {name: all(need.satisfied() for need in needs_of(name)) for name in TRAINERS},
    }


def plugins_in_table() -> list[Plugin]:
    """The registered plugins as the table of loops has them: those that train adapters last."""
    load_plugins()
    return sorted(registered(), key=lambda plugin: isinstance(plugin, SlicePlugin))


def document() -> str:
    """The table of plugins and loops, as Markdown, for docs/support.md."""
    plugins = plugins_in_table()
    head = f"| loop | {' | '.join(plugin.name for plugin in plugins)} |\n|---{'|---' * len(plugins)}|\n"
    return head + "".join(f"| {one.name} | {' | '.join(map(one.does, plugins))} |\n" for one in all_loops())


def _hosts() -> list[dict[str, Any]]:
    rows = []
    for need in dict.fromkeys(need for name in TRAINERS for need in needs_of(name)):
        name, version = need.distribution, need.installed()
        status = "missing" if version is None else "supported" if need.satisfied() else "not supported"
        rows.append({"name": name, "found": version, "supports": str(need.supports), "status": status})
    return rows


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


def _loop(loop: Loop, recipe: Recipe | None) -> dict[str, Any]:
    """What each plugin can do in a loop, and what keeps the whole loop from running here."""
    plugins = [
        {"name": one.name, "does": loop.does(one), "enabled": recipe and one in recipe.enabled()}
        for one in plugins_in_table()
    ]
    refused = _refused(loop, recipe)
    return {"name": loop.name, "trainer": loop.trainer, "start": loop.start, "plugins": plugins, "refused": refused}


def _refused(loop: Loop, recipe: Recipe | None) -> str | None:
    try:
        require(loop.trainer)
        if recipe is not None:
            recipe.changed({"trainer": loop.trainer})
    except EvenloadError as error:
        return f"{error.what} ({error.found}): {error.do}"
    return None


def _attention_paths(recipe: Recipe | None) -> list[dict[str, Any]]:
    """A row a path: the kernel of whole samples, that of parts of samples, and why no faster one. Empty without torch.

    Precision and head dimension are the recipe's; without one bfloat16 and 128 are asked for.
    """
    if find_spec("torch") is None:
        return []
    import torch

    from ..runtime.attention.blocks import BLOCKS
    from ..runtime.attention.kernels import KERNELS, explain

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(recipe.train.dtype if recipe else "", torch.bfloat16)
    inputs = (device, dtype, recipe.model.head_size if recipe else 128)
    (kernel, why), (block, why_block) = explain(KERNELS, *inputs), explain(BLOCKS, *inputs)
    rows = []
    for loop, spec in ((one, spec) for one in all_loops() for spec in one.specs):
        path = f"{loop.name}, {spec}" if spec else loop.name
        if spec == TRANSFORMER_ENGINE:
            rows.append(_transformer_engine(path, block, why_block))
            continue
        parts = {"parts": block, "why_parts": why_block} if loop.cuts else {"parts": None, "why_parts": _WHOLE}
        rows.append({"path": path, "kernel": kernel, "why": why, **parts})
    return rows


def _transformer_engine(path: str, block: str, why_block: str) -> dict[str, Any]:
    """Its own kernels take whole samples alone, in place of which packed attention runs parts."""
    if find_spec("transformer_engine") is None:
        why = "Transformer Engine is not installed"
        return {"path": path, "kernel": None, "why": why, "parts": None, "why_parts": why}
    return {"path": path, "kernel": "transformer_engine", "why": "", "parts": block, "why_parts": why_block}
