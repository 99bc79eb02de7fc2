"""The sections of the page that are charts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...core.input.format import gib, seconds
from . import charts
from .facts import AGAIN_KEY, PARTS, WHAT_THEY_DO, Facts, Part, ends_of, histogram, pieces_of, shown_places
from .markup import Markup, duration, figures, number, say, section, size, tag


def lengths(facts: Facts) -> Markup:
    lengths = np.sort(facts.forecast.lengths)[::-1]
    pairs = np.cumsum(lengths.astype(np.float64) ** 2)
    half = int(np.searchsorted(pairs, 0.5 * pairs[-1])) + 1
    half_of = "the longest one" if half == 1 else f"the longest {half:,} of them"
    text = (
        f"{len(lengths):,} sequences, {int(lengths.sum()):,} tokens. Half of "
        f"attention's work is in {half_of}, {half / len(lengths):.1%} of the sequences and "
        f"{lengths[:half].sum() / lengths.sum():.0%} of the tokens."
    )
    edges, shares = histogram(lengths)
    drawn = {"sequences": ("plain", ""), "tokens": ("backward", "linear layers")}
    drawn["attention"] = ("forward", "length squared")
    spans = [f"{low:,} to {high:,} tokens" for low, high in pairwise(edges)]
    cells: list[str] = []
    for name, (colour, note) in drawn.items():
        titles = [f"{span}: {share:.1%} of {name}" for span, share in zip(spans, shares[name], strict=True)]
        label = [name, tag("small", note)] if note else [name]
        cells += [tag("div", *label, class_="name"), charts.columns(shares[name], colour, titles)]
    every = max(1, -(-(len(edges) - 1) // 6))
    marks = [(float(k), _tokens(edge)) for k, edge in enumerate(edges) if k % every == 0]
    cells.append(charts.axis(marks, len(edges) - 1))
    quantiles = {"median": 0.5, "90th percentile": 0.9, "99th percentile": 0.99, "longest": 1.0}
    values = {name: int(np.quantile(lengths, q, method="higher")) for name, q in quantiles.items()}
    stats = figures({name: number(value, f"{value:,}") for name, value in values.items()})
    figure = tag("figure", tag("div", *cells, class_="spread"), aria_label="Shares by length of the sequence in tokens")
    return section("lengths", "What your lengths look like", say(text), figure, stats)


def timelines(facts: Facts) -> Markup:
    shown = facts.shown
    most = 1.01 * max(one.steps[0].outcome.step_s for one in shown)
    panels, parts, all_ranks, again = [], set[Part](), True, False
    limits = facts.ours.steps[0].plan.limits
    for one in shown:
        first = one.steps[0]
        places, complete = shown_places(first)
        all_ranks &= complete
        pieces = pieces_of(first, facts.context.costs, places)
        staged = limits.num_stages > 1
        rows = [
            charts.TimelineRow(
                f"rank {rank}, stage {stage}" if staged else f"rank {rank}", of_row, staged and stage == 0
            )
            for (stage, rank), of_row in pieces.items()
        ]
        parts |= {piece.part for row in rows for piece in row.pieces}
        again |= any(piece.again > 0 for row in rows for piece in row.pieces)
        step_s, note = first.outcome.step_s, WHAT_THEY_DO.get(one.name)
        name = tag("div", tag("b", one.label), *([tag("small", note)] if note else []))
        head = tag("div", name, tag("div", duration(step_s), class_="value"), class_="head")
        drawn = charts.timeline(rows, step_s, most, facts.bounds_s[0], ends_of(places, complete))
        panels.append(tag("div", head, drawn, class_="panel"))
    panels.append(charts.axis([(at, seconds(at) if at else "0") for at in charts.ticks(most)], most))
    keys: list[Part] = [part for part in PARTS if part in parts or part == "waiting"]
    rows_are = "Every row is a rank" if limits.num_stages == 1 else "Every row is a stage of a rank, the ranks apart"
    text = f"{rows_are}; the time axis is the same. Blue computes your tokens."
    if again:
        text += f" Green {AGAIN_KEY}, by their share."
    if not all_ranks:
        shares = f"Of {limits.num_ranks:,} ranks {len(places) // limits.num_stages} are shown"
        text += f" {shares}, from the busiest to the idlest of each plan, evenly spaced."
    which = "One step, rank by rank" if len(facts.bounds_s) == 1 else "The first step, rank by rank"
    figure = tag("figure", *panels, class_="panels", aria_label="Timelines of one step")
    return section("step", which, say(text), charts.time_legend(keys, facts.bounds_s[0]), figure)


def where(facts: Facts) -> Markup:
    most = max(facts.bound_s, *(one.step_s for one in facts.ranked))
    rows = []
    for one in facts.ranked:
        segments = [
            (
                part,
                taken,
                f"{one.label}: {PARTS[part]}, {seconds(taken)}, {taken / one.step_s:.1%} of the step",
                f"{taken / one.step_s:.0%}" if taken / most > 0.1 else "",
            )
            for part, taken in one.parts.items()
        ]
        rows.append(charts.Bar(one.label, "", duration(one.step_s), segments, one is facts.ours))
    keys: list[Part] = [part for part in PARTS if any(one.parts[part] > 0 for one in facts.ranked)]
    text = "Mean of all ranks and steps, slowest planner first. The percentages are of each planner's own step."
    figure = tag("figure", charts.bars(rows, most, facts.bound_s), aria_label="Where the time goes, by planner")
    legend = charts.time_legend(keys, facts.bound_s)
    return section("where", "Where the time goes", say(text), legend, figure)


def memory(facts: Facts) -> Markup:
    device = facts.context.cluster.memory_bytes
    states_bytes = facts.forecast.fixed_bytes
    ranked = sorted(facts.ranked, key=lambda one: -one.peak_bytes)
    most = max(device, ranked[0].peak_bytes)
    rows = []
    for one in ranked:
        fixed = min(states_bytes, one.peak_bytes)
        moving = one.peak_bytes - fixed
        over = one.peak_bytes > device
        segments = [
            ("plain", fixed, f"{one.label}: weights, gradients, optimizer: {gib(fixed)}", ""),
            ("over" if over else "forward", moving, f"{one.label}: activations and prefix KV: {gib(moving)}", ""),
        ]
        note = "does not fit" if over else ""
        rows.append(charts.Bar(one.label, note, size(one.peak_bytes), segments, one is facts.ours))
    keys = {"plain": "weights, gradients, optimizer"} if states_bytes else {}
    legend = charts.legend(keys | {"forward": "activations, prefix KV", "bound": f"the device has {gib(device)}"})
    text = "The most that any rank holds at once in any step."
    if not states_bytes:
        text += " These costs say nothing of weights, gradients and optimizer states: they come on top."
    figure = tag("figure", charts.bars(rows, most, device), aria_label="Peak memory by planner")
    return section("memory", "Memory", say(text), legend, figure)


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)
