"""The sections of the page that are charts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .._shared.show import seconds
from . import charts
from .facts import AGAIN_KEY, PARTS, Facts, Part, ends_of, histogram, pieces_of, rows_of, shown_ranks
from .markup import Markup, number, tag
from .outlook import what_it_does
from .words import duration, gib, section

_MOST_ROWS = 32
"""Of a timeline."""


def lengths(facts: Facts) -> Markup:
    lengths = np.sort(facts.lengths)[::-1]
    pairs = np.cumsum(lengths.astype(np.float64) ** 2)
    half = int(np.searchsorted(pairs, 0.5 * pairs[-1])) + 1
    half_of = "the longest one" if half == 1 else f"the longest {half:,} of them"
    say = tag(
        "p",
        f"{len(lengths):,} sequences, {int(lengths.sum()):,} tokens. Half of "
        f"attention's work is in {half_of}, {half / len(lengths):.1%} of the sequences and "
        f"{lengths[:half].sum() / lengths.sum():.0%} of the tokens.",
        class_="say",
    )
    edges, shares = histogram(lengths)
    names = {
        "sequences": ("plain", "sequences", ""),
        "tokens": ("backward", "tokens", "linear layers"),
        "attention": ("forward", "attention", "length squared"),
    }
    spans = [f"{low:,} to {high:,} tokens" for low, high in pairwise(edges)]
    cells: list[str] = []
    for key, (colour, name, note) in names.items():
        titles = [f"{span}: {share:.1%} of {name}" for span, share in zip(spans, shares[key], strict=True)]
        label = [name, tag("small", note)] if note else [name]
        cells += [tag("div", *label, class_="name"), charts.columns(shares[key], colour, titles)]
    every = max(1, -(-(len(edges) - 1) // 6))
    marks = [(float(k), _tokens(edge)) for k, edge in enumerate(edges) if k % every == 0]
    cells.append(charts.axis(marks, len(edges) - 1))
    quantiles = {"median": 0.5, "90th percentile": 0.9, "99th percentile": 0.99, "longest": 1.0}
    stats = [
        tag(
            "div",
            tag("dt", name),
            tag("dd", number(value := int(np.quantile(lengths, q, method="higher")), f"{value:,}")),
        )
        for name, q in quantiles.items()
    ]
    figure = tag("figure", tag("div", *cells, class_="spread"), aria_label="Shares by length of the sequence in tokens")
    return section("lengths", "What your lengths look like", say, figure, tag("dl", *stats, class_="facts"))


def timelines(facts: Facts) -> Markup:
    shown = facts.shown
    most = 1.01 * max(one.steps[0].outcome.step_s for one in shown)
    panels, parts, all_ranks, again = [], set[Part](), True, False
    num_stages = facts.ours.steps[0].plan.limits.num_stages
    for one in shown:
        first = one.steps[0]
        ranks, complete = shown_ranks(first, _MOST_ROWS)
        all_ranks &= complete
        pieces = pieces_of(first, facts.context.costs, set(rows_of(ranks, num_stages)))
        rows = [
            charts.Row(_row_name(rank, stage, num_stages), pieces[stage, rank], stage == 0 and num_stages > 1)
            for stage, rank in rows_of(ranks, num_stages)
        ]
        parts |= {piece.part for row in rows for piece in row.pieces}
        again |= any(piece.again > 0 for row in rows for piece in row.pieces)
        ends = ends_of(first, ranks, complete)
        outcome = first.outcome
        head = tag(
            "div",
            tag("div", tag("b", one.label), *([tag("small", note)] if (note := what_it_does(one.name)) else [])),
            tag("div", duration(outcome.step_s), class_="value"),
            class_="head",
        )
        drawn = charts.timeline(rows, outcome.step_s, most, facts.first_bound_s, ends)
        panels.append(tag("div", head, drawn, class_="panel"))
    panels.append(charts.axis([(at, seconds(at) if at else "0") for at in charts.ticks(most)], most))
    keys: list[Part] = [part for part in PARTS if part in parts or part == "waiting"]
    rows_say = "Every row is a rank" if num_stages == 1 else "Every row is a stage of a rank, the ranks apart"
    say = f"{rows_say}; the time axis is the same. Blue computes your tokens."
    if again:
        say += f" Green {AGAIN_KEY}, by their share."
    if not all_ranks:
        count = len(shown_ranks(facts.ours.steps[0], _MOST_ROWS)[0])
        total = facts.ours.steps[0].plan.limits.num_ranks
        say += f" Of {total:,} ranks {count} are shown, from the busiest to the idlest of each plan, evenly spaced."
    which = "One step, rank by rank" if len(facts.ours.steps) == 1 else "The first step, rank by rank"
    figure = tag("figure", *panels, class_="panels", aria_label="Timelines of one step")
    bound = f"lower bound, {seconds(facts.first_bound_s)}"
    return section("step", which, tag("p", say, class_="say"), charts.legend(keys, bound=bound), figure)


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
    say = "Mean of all ranks and steps, slowest planner first. The percentages are of each planner's own step."
    figure = tag("figure", charts.bars(rows, most, facts.bound_s), aria_label="Where the time goes, by planner")
    bound = f"lower bound, {seconds(facts.bound_s)}"
    return section(
        "where", "Where the time goes", tag("p", say, class_="say"), charts.legend(keys, bound=bound), figure
    )


def memory(facts: Facts) -> Markup:
    device = facts.context.cluster.memory_bytes
    ranked = sorted(facts.ranked, key=lambda one: -one.peak_bytes)
    most = max(device, ranked[0].peak_bytes)
    rows = []
    for one in ranked:
        fixed = min(facts.fixed_bytes, one.peak_bytes)
        moving = one.peak_bytes - fixed
        over = one.peak_bytes > device
        segments = [
            ("plain", fixed, f"{one.label}: weights, gradients, optimizer: {gib(fixed)}", ""),
            ("over" if over else "forward", moving, f"{one.label}: activations and prefix KV: {gib(moving)}", ""),
        ]
        note = "does not fit" if over else ""
        rows.append(
            charts.Bar(one.label, note, number(one.peak_bytes, gib(one.peak_bytes)), segments, one is facts.ours)
        )
    fixed_key = tag("li", tag("i", class_="key plain"), "weights, gradients, optimizer")
    legend = tag(
        "ul",
        *([fixed_key] if facts.fixed_bytes else []),
        tag("li", tag("i", class_="key forward"), "activations, prefix KV"),
        tag("li", tag("i", class_="key bound"), f"the device has {gib(device)}"),
        class_="legend",
    )
    text = "The most that any rank holds at once in any step."
    if not facts.fixed_bytes:
        text += " These costs say nothing of weights, gradients and optimizer states: they come on top."
    say = tag("p", text, class_="say")
    figure = tag("figure", charts.bars(rows, most, device), aria_label="Peak memory by planner")
    return section("memory", "Memory", say, legend, figure)


def _row_name(rank: int, stage: int, num_stages: int) -> str:
    return f"rank {rank}, stage {stage}" if num_stages > 1 else f"rank {rank}"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)
