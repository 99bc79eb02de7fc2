"""Replayed loads in the plot: busiest over mean rank of every layer, before and after, by planner."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np

from ...core.plan.expert_policy import AT_HOME
from ..experts.replay import Replay, Replayed

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#12375c", "#8d8f92", "#b8860b", "#6a3d9a")
_BEFORE, _RULE = "#c2410c", "#e2e1dc"
_MOST_MARKED = 64


def draw_loads(axes: Any, key_axes: Any, replay: Replay) -> None:
    """Lines through the layers, a planner each, and their key on axes of its own."""
    layers, colours = replay.loads.layers, cycle(_COLOURS)
    places = np.arange(len(layers))
    for place, (name, one) in enumerate(replay.planners.items()):
        before = one.planner == AT_HOME
        colour, style = (_BEFORE, (0, (4, 3))) if before else (next(colours), "-")
        marker = "o" if len(layers) <= _MOST_MARKED else ""
        line = {"color": colour, "linestyle": style, "linewidth": 1.4, "marker": marker, "markersize": 3.5}
        line["zorder"] = 3 - place / len(replay.planners)  # the plugin's own above its baselines
        axes.plot(places, one.ratios.mean(axis=0), label=_label(name, one), **line)
    shown = range(0, len(layers), max(1, -(-len(layers) // 16)))
    axes.set_xticks(list(shown), [str(layers[place]) for place in shown])
    axes.set_xlabel(f"layers with experts, ep {replay.ep}; means of {replay.passes:,} passes")
    axes.set_title("tokens of a group's busiest rank over its mean rank's, predicted from recorded loads")
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    key_axes.axis("off")
    key_axes.legend(*axes.get_legend_handles_labels(), frameon=False, loc="upper left")


def _label(name: str, one: Replayed) -> str:
    if one.planner == AT_HOME:
        return f"{name}: experts at home"
    return f"{name}, {one.late_steps} steps late" if one.late_steps else name
