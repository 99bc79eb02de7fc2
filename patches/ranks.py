"""Whether all ranks of a script run evenload, as a row; what it does is in `integrations.unmodified.roll_call`."""

from __future__ import annotations

from ..core.recipe.recipe import Recipe
from ..integrations.host.versions import requirement
from .row import Patch, from_module


def rows(recipe: Recipe | None = None) -> tuple[Patch, ...]:
    """The row; ``recipe`` is what the ranks compare, and without one it only describes itself."""
    return (
        Patch(
            name="ranks.started",
            target="torch.distributed.distributed_c10d:init_process_group",
            supports=requirement("torch"),
            why="All ranks leave it together, and long before their first step: there each leaves word that evenload "
            "runs in it, so that ranks without it are named instead of waited for. Groups are made as usual.",
            wrapper=from_module("..integrations.unmodified.roll_call:init_process_group", recipe),
            reach=("torch", "__main__"),
        ),
    )
