"""The table of plugins and training loops, for `evenload doctor` and docs/switching_on.md."""

from __future__ import annotations

from ...core.recipe.traits import all_loops
from ...core.registry import Plugin, registered


def plugins_in_table() -> list[Plugin]:
    """The registered plugins as the table has them: those that train adapters last."""
    return sorted(registered(), key=lambda plugin: plugin.adapts)


def document() -> str:
    """The table of plugins and loops, as Markdown."""
    plugins = plugins_in_table()
    head = f"| loop | {' | '.join(plugin.name for plugin in plugins)} |\n|---{'|---' * len(plugins)}|\n"
    return head + "".join(f"| {one.name} | {' | '.join(map(one.does, plugins))} |\n" for one in all_loops())
