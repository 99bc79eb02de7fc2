"""One PNG to decide on: the first step rank by rank under three planners, next to the lengths that made it so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ...core.input.format import seconds
from ...core.plan.expert_policy import AT_HOME
from ...training.experts.replay import Replay, Replayed
from ...training.files import whole
from ...training.forecast.forecast import Forecast
from .facts import (
    AGAIN_KEY,
    FOOT,
    PARTS,
    WHAT_THEY_DO,
    Facts,
    Part,
    PlannerFacts,
    Stretch,
    ends_of,
    facts_of,
    histogram,
    pieces_of,
    shown_places,
)

_MOST_NUMBERED = 16
"""Rows that are high enough for numbers."""
_EDGED = 0.004
"""Passes that are longer are parted by edges, which would hide shorter ones; as a share of the longest step."""
_OF_A_DIGIT = 0.007
"""Width of a digit, as a share of the longest step."""
_DPI = 120
_INK, _SOFT, _RULE, _MARK, _PAPER = "#1d1f21", "#5c6166", "#e2e1dc", "#c2410c", "#fcfcfa"

_COLOURS: dict[Part, str] = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "weights": "#12375c",
    "again": "#009e73",
    "padding": "#8d8f92",
    "exposed": "#e69f00",
    "sum": "#cc79a7",
    "waiting": "#e6e5e0",
}
"""Okabe and Ito's palette, for readers who see fewer colours."""

_LINES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#12375c", "#8d8f92", "#b8860b", "#6a3d9a")
"""Of replayed loads, a planner each."""
_MOST_MARKED = 64
"""Layers whose points have markers."""

_STYLE = {
    "font.size": 9.5,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _RULE,
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), _SOFT),
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), _PAPER),
}


def write(forecast: Forecast, path: Path) -> None:
    """Write the picture. Raises EvenloadError."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    facts = facts_of(forecast)
    shown = facts.shown
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.04)
        heights = [1.75] * len(shown) + ([2.6] if forecast.loads else [])
        figure = Figure(figsize=(12.0, 1.6 + sum(heights)), dpi=_DPI, layout=layout)
        grid = figure.add_gridspec(len(heights), 2, width_ratios=(3.1, 1), height_ratios=heights)
        figure.suptitle(_headline(facts), x=0.01, ha="left", fontsize=14, fontweight="bold")
        first, parts = None, set[Part]()
        most_s = max(one.steps[0].outcome.step_s for one in shown)
        for place, one in enumerate(shown):
            first = axes = figure.add_subplot(grid[place, 0], sharex=first)
            parts |= _draw_step(axes, one, facts, most_s)
            axes.tick_params(labelbottom=place == len(shown) - 1, length=0)
        assert first is not None
        first.set_xlim(0, 1.01 * most_s)
        say = f"seconds of the first step, {facts.forecast.times}"
        first.set_xlabel(f"{say}; numbers are micro-batches" if _is_numbered(shown[0]) else say)
        _draw_lengths(figure.add_subplot(grid[: len(shown), 1]), facts)
        if forecast.loads:
            draw_loads(figure.add_subplot(grid[-1, 0]), figure.add_subplot(grid[-1, 1]), forecast.loads)
        partly = any(any(map(any, one.steps[0].plan.recompute)) for one in shown)
        _draw_legend(figure, parts, facts.bounds_s[0], partly=partly)
        with whole(path) as part:
            figure.savefig(part, format="png", dpi=_DPI)


def _headline(facts: Facts) -> str:
    ours, other, rival = facts.ours, facts.reference, facts.rival
    if not facts.remapped:
        return f"stock {seconds(other.step_s)} a step; no plugin is switched on {facts.basis}"
    beside = [one for one in (other, rival) if one is not None]
    others = "; ".join(f"{one.label} {seconds(one.step_s)}: {one.step_s / ours.step_s:.2f}x" for one in beside)
    return f"evenload {seconds(ours.step_s)} a step, {others} {facts.basis}"


def _draw_step(axes: Any, one: PlannerFacts, facts: Facts, most_s: float) -> set[Part]:
    """Rows of ranks, top to bottom. Returns the parts that occur."""
    first = one.steps[0]
    limits, step_s = first.plan.limits, first.outcome.step_s
    places, complete = shown_places(first)
    axes.barh(range(len(places)), step_s, height=0.86, color=_COLOURS["waiting"], linewidth=0)
    numbered = _is_numbered(one)
    drawn: set[Part] = set()
    for y, pieces in enumerate(pieces_of(first, facts.context.costs, places).values()):
        for part in PARTS:
            spans = [(p.start_s, p.length_s) for p in pieces if p.part == part]
            if spans:
                drawn.add(part)
                widths = [0.5 if numbered and length_s > _EDGED * most_s else 0.0 for _, length_s in spans]
                colours = {"facecolor": _COLOURS[part], "edgecolor": _PAPER}
                axes.broken_barh(spans, (y - 0.43, 0.86), **colours, linewidths=widths)
        for piece in (p for p in pieces if p.again):
            # Downwards is up: the axis is turned round.
            low = 0.86 * FOOT * piece.again
            axes.barh(y + 0.43 - low / 2, piece.length_s, low, left=piece.start_s, color=_COLOURS["again"], linewidth=0)
            drawn.add("again")
        if numbered:
            _draw_numbers(axes, pieces, y, most_s)
    axes.axvline(facts.bounds_s[0], color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_ylim(len(places) - 0.4, -0.6)
    if numbered:
        names = [f"rank {rank}, stage {stage}" if limits.num_ranks > 1 else f"stage {stage}" for stage, rank in places]
        axes.set_yticks(range(len(places)), names)
    else:
        ticks = [0, len(places) - 1][: len(places)]
        axes.set_yticks(ticks, ends_of(places, complete)[: len(ticks)])
    axes.spines[:].set_visible(False)
    sample = "" if complete else f", {len(places) // limits.num_stages} of {limits.num_ranks:,} ranks"
    does = f" ({WHAT_THEY_DO[one.name]})" if one.name in WHAT_THEY_DO else ""
    axes.set_title(f"{one.label}: {seconds(step_s)}{does}{sample}")
    return drawn


def _is_numbered(one: PlannerFacts) -> bool:
    """Passes of stages have their numbers, where rows are high enough."""
    first = one.steps[0]
    return first.plan.limits.num_stages > 1 and len(shown_places(first)[0]) <= _MOST_NUMBERED


def _draw_numbers(axes: Any, pieces: Sequence[Stretch], y: float, most_s: float) -> None:
    for piece in pieces:
        text = str(piece.number)
        # Half a digit of air: numbers of neighbours must not run into one.
        if piece.number >= 0 and piece.length_s > _OF_A_DIGIT * (len(text) + 0.5) * most_s:
            ink = "#ffffff" if piece.part in ("forward", "weights") else _INK
            axes.text(piece.start_s + piece.length_s / 2, y, text, color=ink, fontsize=6, ha="center", va="center")


def _draw_lengths(axes: Any, facts: Facts) -> None:
    edges, shares = histogram(facts.forecast.lengths)
    places = np.arange(len(edges) - 1)
    colours: dict[str, Part] = {"sequences": "padding", "tokens": "backward", "attention": "forward"}
    for shift, (name, part) in enumerate(colours.items()):
        percents, colour = [100 * share for share in shares[name]], _COLOURS[part]
        axes.barh(places + 0.2 + 0.3 * shift, percents, height=0.28, color=colour, label=name)
    shown = range(0, len(edges), max(1, -(-len(edges) // 9)))
    axes.set_yticks(list(shown), [f"{edges[k]:,}" for k in shown])
    axes.set_ylabel("tokens of a sequence")
    axes.set_xlabel("percent of all")
    axes.set_title("shares by length")
    _ruled(axes, "x", "top", "right", "bottom")
    axes.legend(frameon=False, loc="best", labelcolor=_INK)


def _draw_legend(figure: Any, parts: set[Part], bound_s: float, *, partly: bool) -> None:
    """``partly``: some plan recomputes layers of its own choice."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [
        Patch(color=_COLOURS[part], label=f"{name} ({AGAIN_KEY})" if part == "again" and partly else name)
        for part, name in PARTS.items()
        if part in parts or part == "waiting"
    ]
    keys.append(Line2D([], [], color=_MARK, linestyle=(0, (4, 3)), label=f"lower bound, {seconds(bound_s)}"))
    ncols = min(len(keys), 4 if partly else 8)
    figure.legend(handles=keys, loc="outside lower left", ncols=ncols, frameon=False, labelcolor=_SOFT)


def draw_loads(axes: Any, key_axes: Any, replay: Replay) -> None:
    """Lines through the layers, a planner each, and their key on axes of its own."""
    layers, colours = replay.loads.layers, cycle(_LINES)
    places = np.arange(len(layers))
    for place, (name, one) in enumerate(replay.planners.items()):
        before = one.planner == AT_HOME
        colour, style = (_MARK, (0, (4, 3))) if before else (next(colours), "-")
        marker = "o" if len(layers) <= _MOST_MARKED else ""
        line = {"color": colour, "linestyle": style, "linewidth": 1.4, "marker": marker, "markersize": 3.5}
        line["zorder"] = 3 - place / len(replay.planners)  # the plugin's own above its baselines
        axes.plot(places, one.ratios.mean(axis=0), label=_label(name, one), **line)
    shown = range(0, len(layers), max(1, -(-len(layers) // 16)))
    axes.set_xticks(list(shown), [str(layers[place]) for place in shown])
    axes.set_xlabel(f"layers with experts, ep {replay.ep}; means of {replay.passes:,} passes")
    axes.set_title("tokens of a group's busiest rank over its mean rank's, predicted from recorded loads")
    _ruled(axes, "y", "top", "right")
    key_axes.axis("off")
    key_axes.legend(*axes.get_legend_handles_labels(), frameon=False, loc="upper left")


def _label(name: str, one: Replayed) -> str:
    if one.planner == AT_HOME:
        return f"{name}: experts at home"
    return f"{name}, {one.late_steps} steps late" if one.late_steps else name


def _ruled(axes: Any, direction: str, *without: str) -> None:
    axes.tick_params(length=0)
    axes.spines[list(without)].set_visible(False)
    axes.grid(axis=direction, color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
