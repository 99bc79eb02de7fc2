"""A training loop that runs plans, and what each plugin does there: it follows from what both declare.

``refused`` ends a run before its first step; ``parts of samples`` are slices and shared sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from ..registry import Plugin

NOTHING, REFUSED = "-", "refused"
OWN, SCRIPTS = "evenload train", "evenload run"
LOCAL, TRANSFORMER_ENGINE = "local spec", "Transformer Engine's spec"
"""Layer specs; the second has kernels of its own, which take whole samples alone."""


class Loop(NamedTuple):
    """A training loop that runs plans."""

    name: str
    start: str
    """What its user types."""
    cuts: bool = True
    """Parts of samples may run on a rank, where the attention allows it."""
    stages: str | None = None
    """Orders run over pipeline stages, and under what alone; None: there is one stage."""
    copies: bool = True
    """Ranks may share their experts."""
    specs: tuple[str, ...] = ("",)
    """Layer specs of the trainer, each an attention path."""
    trainer: str = ""
    """The name of its row, which `traits.all_loops` fills in."""

    def does(self, plugin: Plugin) -> str:
        """What a plugin does in the loop, in a few words."""
        if (plugin.adapts and self.start != OWN) or (plugin.place == "layers" and not self.copies):
            return REFUSED
        if plugin.orders:
            return NOTHING if self.stages is None else plugin.does + self.stages
        return (plugin.does if self.cuts else plugin.does_to_whole) or NOTHING
