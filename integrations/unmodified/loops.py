"""What each plugin can do in which training loop: the one table, for `evenload doctor` and docs/switching_on.md.

A loop has a trainer and a way in. What a plugin does there follows from what it declares and what the loop can do;
``refused`` ends a run before its first step; ``parts of samples`` are slices and shared sequences. Imports neither a
trainer nor torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.registry import Plugin, registered

NOTHING, REFUSED = "-", "refused"


class Loop(NamedTuple):
    """A training loop that runs plans."""

    name: str
    trainer: str
    """Of the recipe."""
    start: str
    """What its user types."""
    cuts: bool = True
    """Parts of samples may run on a rank, where the attention allows it."""
    stages: str | None = None
    """Orders run over pipeline stages, and under what alone; None: there is one stage."""
    copies: bool = True
    """Ranks may share their experts."""

    def does(self, plugin: Plugin) -> str:
        """What a plugin does in the loop, in a few words."""
        if (plugin.adapts and self.start != OWN) or (plugin.place == "layers" and not self.copies):
            return REFUSED
        if plugin.orders:
            return NOTHING if self.stages is None else plugin.does + self.stages
        return (plugin.does if self.cuts else plugin.does_to_whole) or NOTHING


OWN, SCRIPTS = "evenload train", "evenload run"

LOOPS = (
    Loop("evenload train, Megatron-Core", "megatron", OWN, stages=""),
    Loop("evenload train, DeepSpeed", "deepspeed", OWN, stages=", ZeRO 0, 1"),
    Loop("Megatron-LM, Megatron-Core loops", "megatron", SCRIPTS, stages=""),
    Loop("deepspeed.initialize", "deepspeed", SCRIPTS, cuts=False),
    Loop("Transformers' Trainer", "transformers", SCRIPTS, copies=False),
    Loop("a loop of Accelerate", "transformers", SCRIPTS, cuts=False, copies=False),
)


def plugins_in_table() -> list[Plugin]:
    """The registered plugins as the table has them: those that train adapters last."""
    return sorted(registered(), key=lambda plugin: plugin.adapts)


def document() -> str:
    """The table of plugins and loops, as Markdown."""
    plugins = plugins_in_table()
    head = f"| loop | {' | '.join(plugin.name for plugin in plugins)} |\n|---{'|---' * len(plugins)}|\n"
    return head + "".join(f"| {one.name} | {' | '.join(map(one.does, plugins))} |\n" for one in LOOPS)
