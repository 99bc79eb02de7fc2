"""Samples that stay together: which they are, and which planners keep them so (`core.laws` holds plans to it)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import EvenloadError
from ..plan.step_plan import Lengths, as_lengths
from ..registry import Plugin, PluginConfig

Links = Sequence[tuple[Plugin, PluginConfig]]


def groups_of(batch: Lengths, said: Lengths, links: Links) -> Lengths:
    """The group of each sequence [S]: as somebody said, or so many neighbours as a setting says; empty: no groups."""
    size = max((getattr(config, "group_size", 0) for _, config in links), default=0)
    return as_lengths(np.arange(len(batch)) // size) if size and not len(said) else said


def refuse_others(asked: bool, links: Links) -> None:
    """Raise EvenloadError where sequences are to stay together, or in equal counts, and not all planners keep them."""
    others = [plugin.name for plugin, _ in links if not plugin.keeps_groups]
    if asked and (others or not links):
        raise EvenloadError(
            "not every enabled plugin keeps samples of a group together, or ranks at equal counts of them",
            f"enabled are {', '.join(plugin.name for plugin, _ in links) or 'none'}",
            f"disable {', '.join(others)}, or ask for no groups" if others else "enable plugins.packing",
        )
