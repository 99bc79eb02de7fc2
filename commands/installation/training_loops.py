"""What each plugin can do in which training loop: as docs/switching_on.md has it, and here, with the versions that are
installed, for a recipe."""

from __future__ import annotations

from typing import Any

from ...api import load_plugins
from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import Loop, all_loops
from ...core.registry import Plugin, registered
from ...training.hosts import require


def plugins_in_table() -> list[Plugin]:
    """The registered plugins as the table has them: those that train adapters last."""
    load_plugins()
    return sorted(registered(), key=lambda plugin: plugin.adapts)


def document() -> str:
    """The table of plugins and loops, as Markdown."""
    plugins = plugins_in_table()
    head = f"| loop | {' | '.join(plugin.name for plugin in plugins)} |\n|---{'|---' * len(plugins)}|\n"
    return head + "".join(f"| {one.name} | {' | '.join(map(one.does, plugins))} |\n" for one in all_loops())


def training_loops(recipe: Recipe | None) -> list[dict[str, Any]]:
    """What evenload would do in each loop that it knows, a row each."""
    return [_loop(loop, recipe) for loop in all_loops()]


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
