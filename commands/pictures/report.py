"""A page to read in a minute: one HTML file without scripts or requests, every number predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..plan import Outlook
from ..show import percent, seconds
from . import charts
from .facts import PARTS, Facts, Part, Planner, facts_of, histogram, pieces_of, rows_of, shown_ranks
from .files import whole
from .markup import Markup, join, number, tag
from .outlook import about, what_it_does

_MOST_ROWS = 32
"""Of a timeline."""

_MOST_STEPS = 50
"""Rows of the table of steps."""

_SAME = 0.005
"""Ratios closer to one than this are told as equal."""

_REMEDY = (
    "What helps: more sequences a step (train.global_batch_size), fewer ranks, or more ranks a sequence (parallel.cp)."
)

GIB = 2.0**30

_SHORT = {"against evenload": "ratio", "against stock": "ratio", "planning, measured": "planning"}
"""Heads of a table where a page is narrow."""


def write_report(outlook: Outlook, path: Path) -> None:
    """Write the page. Raises EvenloadError."""
    page = page_of(outlook)
    with whole(path) as part:
        part.write_text(page, encoding="utf-8")


def page_of(outlook: Outlook) -> str:
    """The page as text."""
    facts = facts_of(outlook)
    notes = [_bounding(step) for step in outlook.to_json()["steps"]]
    sections = [
        _headline(facts, outlook, notes),
        _lengths(facts, len(outlook.steps)),
        _timelines(facts),
        _where(facts),
        _bound(facts, notes),
        _memory(facts),
        _tables(facts, outlook),
        _fine_print(facts, outlook),
    ]
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(title="evenload: what it gains, predicted", body=join(*sections))


def _headline(facts: Facts, outlook: Outlook, notes: Sequence[str]) -> Markup:
    ours, stock, rival = facts.ours, facts.stock, facts.rival
    ratio = stock.step_s / ours.step_s
    layout, cluster = facts.situation.layout, facts.situation.cluster
    eyebrow = f"{layout.world_size:,} ranks, {cluster.name}, {_count(len(outlook.steps), 'step')} planned"
    if not facts.evened:
        head = join("Stock: ", _time(ours.step_s), " a step. No plugin is switched on")
    elif ratio > 1 + _SAME:
        head = join(
            *("evenload: ", _time(ours.step_s), " a step instead of ", _time(stock.step_s), ": ", _times(ratio)),
        )
    elif ratio > 1 - _SAME:
        head = join("evenload: ", _time(ours.step_s), " a step, as stock: nothing to gain here")
    else:
        head = join("evenload: ", _time(ours.step_s), " a step, slower than stock's ", _time(stock.step_s))
    lead = [tag("h1", head, " ", tag("small", "(predicted)"))]
    if rival is not None:
        lead.append(tag("p", *_against(ours, rival), class_="lead"))
    if any(notes) and ratio < 1.05:
        lead.append(tag("p", f"Why: {_sequence_bound(notes)}.", class_="lead"))
    return tag("header", tag("p", eyebrow, class_="eyebrow"), *lead)


def _against(ours: Planner, rival: Planner) -> list[str]:
    ratio = rival.step_s / ours.step_s
    told = "The strongest simple baseline, "
    name = tag("b", rival.label)
    if abs(ratio - 1) <= _SAME:
        return [told, name, ", takes the same time: ", _time(rival.step_s), "."]
    verdict = f", takes {'more' if ratio > 1 else 'less'}: "
    return [told, name, verdict, _time(rival.step_s), "; evenload is ", _times(ratio), " against it."]


def _lengths(facts: Facts, num_steps: int) -> Markup:
    lengths = np.sort(facts.lengths)[::-1]
    pairs = np.cumsum(lengths.astype(np.float64) ** 2)
    half = int(np.searchsorted(pairs, 0.5 * pairs[-1])) + 1
    half_of = "the longest one" if half == 1 else f"the longest {half:,} of them"
    say = tag(
        "p",
        f"{len(lengths):,} sequences, {int(lengths.sum()):,} tokens in {_count(num_steps, 'step')}. Half of "
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
    return _section("lengths", "What your lengths look like", say, figure, tag("dl", *stats, class_="facts"))


def _timelines(facts: Facts) -> Markup:
    shown = facts.shown
    most = 1.01 * max(one.steps[0].outcome.step_s for one in shown)
    panels, parts, all_ranks = [], set[Part](), True
    num_stages = facts.ours.steps[0].plan.limits.num_stages
    for one in shown:
        first = one.steps[0]
        ranks, complete = shown_ranks(first, _MOST_ROWS)
        all_ranks &= complete
        pieces = pieces_of(first, facts.situation.costs, set(rows_of(ranks, num_stages)))
        rows = [
            charts.Row(_row_name(rank, stage, num_stages), pieces[stage, rank], stage == 0 and num_stages > 1)
            for stage, rank in rows_of(ranks, num_stages)
        ]
        parts |= {piece.part for row in rows for piece in row.pieces}
        ends = (f"rank {ranks[0]}", f"rank {ranks[-1]}") if complete else ("busiest", "idlest")
        outcome = first.outcome
        head = tag(
            "div",
            tag("div", tag("b", one.label), *([tag("small", note)] if (note := what_it_does(one.name)) else [])),
            tag("div", _time(outcome.step_s), class_="value"),
            class_="head",
        )
        drawn = charts.timeline(rows, outcome.step_s, most, facts.first_bound_s, ends)
        panels.append(tag("div", head, drawn, class_="panel"))
    panels.append(charts.axis([(at, seconds(at) if at else "0") for at in charts.ticks(most)], most))
    keys: list[Part] = [part for part in PARTS if part in parts or part == "waiting"]
    rows_say = "Every row is a rank" if num_stages == 1 else "Every row is a stage of a rank, the ranks apart"
    say = f"{rows_say}; the time axis is the same. Blue computes your tokens."
    if not all_ranks:
        count = len(shown_ranks(facts.ours.steps[0], _MOST_ROWS)[0])
        total = facts.ours.steps[0].plan.limits.num_ranks
        say += f" Of {total:,} ranks {count} are shown, from the busiest to the idlest of each plan, evenly spaced."
    which = "One step, rank by rank" if len(facts.ours.steps) == 1 else "The first step, rank by rank"
    figure = tag("figure", *panels, class_="panels", aria_label="Timelines of one step")
    bound = f"lower bound, {seconds(facts.first_bound_s)}"
    return _section("step", which, tag("p", say, class_="say"), charts.legend(keys, bound=bound), figure)


def _where(facts: Facts) -> Markup:
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
        rows.append(charts.Bar(one.label, "", _time(one.step_s), segments, one is facts.ours))
    keys: list[Part] = [part for part in PARTS if any(one.parts[part] > 0 for one in facts.ranked)]
    say = "Mean of all ranks and steps, slowest planner first. The percentages are of each planner's own step."
    figure = tag("figure", charts.bars(rows, most, facts.bound_s), aria_label="Where the time goes, by planner")
    bound = f"lower bound, {seconds(facts.bound_s)}"
    return _section(
        "where", "Where the time goes", tag("p", say, class_="say"), charts.legend(keys, bound=bound), figure
    )


def _bound(facts: Facts, notes: Sequence[str]) -> Markup:
    ours, bound_s = facts.ours, facts.bound_s
    over = ours.step_s / bound_s - 1 if bound_s else 0.0
    stats = [
        tag("div", tag("dt", "lower bound"), tag("dd", _time(bound_s))),
        tag("div", tag("dt", "evenload" if facts.evened else "stock"), tag("dd", _time(ours.step_s))),
        tag("div", tag("dt", "above the bound"), tag("dd", number(over, percent(max(0.0, over))))),
    ]
    if not any(one.plan.bound_s for one in ours.steps):
        says = ["The bound is this plan's own work, padding included, spread evenly over all ranks."]
    else:
        says = [
            "No plan that keeps a sequence on one rank, or on one context-parallel group of ranks, has a busiest rank "
            "that computes less. Communication, the fill of a pipeline, and the update come on top."
        ]
        if any(notes):
            says.append(f"Here {_sequence_bound(notes)}. {_REMEDY}")
        else:
            says.append("Here the bound is the mean: all work, spread evenly over all ranks.")
    paragraphs = [tag("p", text, class_="say") for text in says]
    return _section("bound", "How much is left", *paragraphs, tag("dl", *stats, class_="facts"))


def _memory(facts: Facts) -> Markup:
    device = facts.situation.cluster.memory_bytes
    ranked = sorted(facts.ranked, key=lambda one: -one.peak_bytes)
    most = max(device, ranked[0].peak_bytes)
    rows = []
    for one in ranked:
        fixed = min(facts.fixed_bytes, one.peak_bytes)
        moving = one.peak_bytes - fixed
        over = one.peak_bytes > device
        segments = [
            ("plain", fixed, f"{one.label}: weights, gradients, optimizer: {_gib(fixed)}", ""),
            ("over" if over else "forward", moving, f"{one.label}: activations and prefix KV: {_gib(moving)}", ""),
        ]
        note = "does not fit" if over else ""
        rows.append(
            charts.Bar(one.label, note, number(one.peak_bytes, _gib(one.peak_bytes)), segments, one is facts.ours)
        )
    fixed_key = tag("li", tag("i", class_="key plain"), "weights, gradients, optimizer")
    legend = tag(
        "ul",
        *([fixed_key] if facts.fixed_bytes else []),
        tag("li", tag("i", class_="key forward"), "activations, prefix KV"),
        tag("li", tag("i", class_="key bound"), f"the device has {_gib(device)}"),
        class_="legend",
    )
    text = "The most that any rank holds at once in any step."
    if not facts.fixed_bytes:
        text += " These costs say nothing of weights, gradients and optimizer states: they come on top."
    say = tag("p", text, class_="say")
    figure = tag("figure", charts.bars(rows, most, device), aria_label="Peak memory by planner")
    return _section("memory", "Memory", say, legend, figure)


def _tables(facts: Facts, outlook: Outlook) -> Markup:
    head = (
        "",
        "step",
        "against evenload" if facts.evened else "against stock",
        "imbalance",
        "padding",
        "waiting",
        "exposed",
        "holds",
    )
    rows = [
        (
            one is facts.ours,
            one.label,
            [
                _time(one.step_s),
                _times(one.step_s / facts.ours.step_s),
                number(one.imbalance, f"{one.imbalance:.3f}"),
                number(one.padding_frac, percent(one.padding_frac)),
                number(one.bubble_frac, percent(one.bubble_frac)),
                number(one.exposed_frac, percent(one.exposed_frac)),
                number(one.peak_bytes, _gib(one.peak_bytes)),
            ],
        )
        for one in reversed(facts.ranked)
    ]
    say = (
        "Step: mean seconds of a step. Imbalance: busiest rank over mean, 1 is even. Waiting: for ranks and stages. "
        "Exposed: communication that no compute hides."
    )
    content = [tag("p", say, class_="say"), _table("planners", head, rows)]
    if len(outlook.steps) > 1:
        content.append(_steps(facts, outlook))
    return _section("table", "All planners, all steps", *content)


def _steps(facts: Facts, outlook: Outlook) -> Markup:
    shown = facts.shown[::-1]
    head = ["", *(one.label for one in shown), "lower bound", "planning, measured"]
    bounds = [step["bound_s"] for step in outlook.to_json()["steps"]]
    rows = []
    for place, step in enumerate(outlook.steps[:_MOST_STEPS]):
        cells = [one.steps[place].outcome.step_s for one in shown]
        rows.append((False, f"step {place}", [_time(s) for s in (*cells, bounds[place], step.plan_s)]))
    more = len(outlook.steps) - _MOST_STEPS
    left = [tag("p", f"{more} more steps are in the table of --json.", class_="say")] if more > 0 else []
    return join(_table("steps", head, rows), *left)


def _table(name: str, head: Sequence[str], rows: Sequence[tuple[bool, str, Sequence[Markup]]]) -> Markup:
    titles = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in head)))
    lines = [
        tag(
            "tr",
            tag("th", label, scope="row"),
            *(tag("td", cell, data_label=_SHORT.get(text, text)) for text, cell in zip(head[1:], cells, strict=True)),
            class_="strong" if strong else None,
        )
        for strong, label, cells in rows
    ]
    return tag("table", titles, tag("tbody", *lines), id=name)


def _fine_print(facts: Facts, outlook: Outlook) -> Markup:
    situation, plans = facts.situation, [step.plan_s for step in outlook.steps]
    layout = ", ".join(f"{name} {size}" for name, size in vars(situation.layout).items())
    measured = f"{seconds(float(np.mean(plans)))} a step in the mean, measured where this page was made"
    lines: dict[str, str] = {
        "ranks": f"{situation.layout.world_size:,}: {layout}",
        "cluster": f"{situation.cluster.name}: {situation.cluster.source}",
        "costs": situation.costs.source,
        "plugins": ", ".join(plugin.name for plugin in outlook.recipe.enabled()) or "none",
        "samples": f"{outlook.num_samples:,} in the file, {len(facts.lengths):,} in the steps shown",
        "planning": measured,
        "command": tag("code", str(about(outlook)["command"])),
    }
    late = float(np.mean([step.delay_steps for step in outlook.steps]))
    if late:
        lines["late"] = f"tokens are trained {late:.2g} steps late in the mean"
    rows = [cell for name, text in lines.items() for cell in (tag("dt", name), tag("dd", text))]
    say = "Everything on this page is predicted, except the time that planning took."
    return _section("fine", "Fine print", tag("p", say, class_="say"), tag("dl", *rows, class_="fine"))


def _bounding(step: dict[str, Any]) -> str:
    """The note of a step that one sequence bounds; empty for others."""
    return next((note for note in step["notes"] if note.startswith("one sequence")), "")


def _sequence_bound(notes: Sequence[str]) -> str:
    """What to say of steps that one sequence bounds."""
    found = [note for note in notes if note]
    if len(notes) == 1:
        return found[0]
    return f"one sequence alone bounds {len(found)} of {len(notes)} steps (in the first of them, {found[0]})"


def _section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def _row_name(rank: int, stage: int, num_stages: int) -> str:
    return f"rank {rank}, stage {stage}" if num_stages > 1 else f"rank {rank}"


def _count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def _time(value: float) -> Markup:
    return number(value, seconds(value))


def _times(ratio: float) -> Markup:
    return number(ratio, f"{ratio:.2f}x")


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 100 else f"{size:.3g} GiB" if size >= 0.1 else f"{1024 * size:.3g} MiB"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)
