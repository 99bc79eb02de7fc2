"""A page to read in a minute: one HTML file without scripts or requests, its times predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

import numpy as np

from ...core.input.format import mib, percent, seconds
from ...core.verbs import ResultTable, tables_of
from ...training.files import whole
from ...training.forecast.forecast import Forecast, Unused
from ...training.pictures.planners import command
from . import sections
from .facts import Facts, PlannerFacts, facts_of
from .markup import Markup, duration, factor, figures, join, number, say, section, share, size, tag

_MOST_STEPS = 50
"""Rows of the table of steps."""

_SAME = 0.005
"""Ratios closer to one than this are told as equal."""

_CERTIFIED = (
    "No plan that keeps a sequence on one rank, or on one context-parallel group of ranks, has a busiest rank that "
    "computes less. Communication, the fill of a pipeline, and the update come on top."
)
_REMEDY = (
    "What helps: more sequences a step (train.global_batch_size), fewer ranks, or more ranks a sequence (plugins.mesh)."
)

_SHORT = {"of stock's": "ratio", "planning, measured": "planning"}
"""Heads of a table where a page is narrow."""


def write(forecast: Forecast, path: Path) -> None:
    """Write the page. Raises EvenloadError."""
    page = page_of(forecast)
    with whole(path) as part:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")


def page_of(forecast: Forecast) -> str:
    """The page of a forecast as HTML."""
    facts = facts_of(forecast)
    # Of each step the note that one sequence bounds it, empty where none does.
    result = forecast.to_json()
    notes_of = (step["notes"] for step in result["steps"])
    notes = [next((note for note in notes if note.startswith("one sequence")), "") for notes in notes_of]
    body = join(
        _headline(facts, notes),
        sections.lengths(facts),
        sections.timelines(facts),
        sections.where(facts),
        _bound(facts, notes),
        sections.memory(facts),
        _tables(facts),
        *map(_of_plugin, tables_of("plan", result)),
        _loads(facts),
        _fine_print(facts),
    )
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=f"evenload: what it gains, {facts.forecast.times}", body=body)


def _headline(facts: Facts, notes: Sequence[str]) -> Markup:
    ours, other, rival = facts.ours, facts.reference, facts.rival
    ratio = other.step_s / ours.step_s
    layout, cluster = facts.context.layout, facts.context.cluster
    done = "planned" if facts.forecast.times == "predicted" else "trained"
    steps = f"{len(notes):,} step{'' if len(notes) == 1 else 's'}"
    eyebrow = f"{layout.world_size:,} ranks, {cluster.name}, {steps} {done}"
    own_s, other_s = duration(ours.step_s), duration(other.step_s)
    if not facts.remapped:
        others = " but ".join(["", *(plugin.name for plugin, _ in facts.forecast.chain.of_slices)])
        head = join("Stock: ", own_s, f" a step. No plugin{others} is switched on")
    elif ratio > 1 + _SAME:
        head = join("evenload: ", own_s, " a step instead of ", other_s, ": ", factor(ratio))
    elif ratio > 1 - _SAME:
        head = join("evenload: ", own_s, f" a step, as {other.label}: nothing to gain here")
    else:
        head = join("evenload: ", own_s, f" a step, slower than {other.label}'s ", other_s)
    lead = [tag("h1", head, " ", tag("small", facts.basis))]
    if rival is not None:
        lead.append(tag("p", *_against(ours, rival), class_="lead"))
    if any(notes) and ratio < 1.05:
        lead.append(tag("p", f"Why: {_sequence_bound(notes)}.", class_="lead"))
    lead += [tag("p", *_with(one), class_="lead") for one in facts.forecast.gaining[:1]]
    if facts.forecast.costs_differ:
        lead.append(tag("p", f"Beware: {facts.forecast.costs_differ}.", class_="lead"))
    return tag("header", tag("p", eyebrow, class_="eyebrow"), *lead)


def _against(ours: PlannerFacts, rival: PlannerFacts) -> list[str]:
    ratio = rival.step_s / ours.step_s
    opening = ["The strongest simple baseline, ", tag("b", rival.label), ", takes "]
    if abs(ratio - 1) <= _SAME:
        return [*opening, "the same time: ", duration(rival.step_s), "."]
    verdict = "more: " if ratio > 1 else "less: "
    return [*opening, verdict, duration(rival.step_s), "; evenload's speedup over it is ", factor(ratio), "."]


def _with(unused: Unused) -> list[str | Markup]:
    """What plugins that are off would gain, and how they are switched on."""
    names = " and ".join(f"plugins.{name}" for name in unused.plugins)
    return [
        f"Predicted speedup with {names}, off in this recipe: ",
        *(factor(unused.gain), f" (planned in {seconds(unused.plan_s)}). Add below plugins "),
        tag("code", unused.line.replace("\n", ", ")),
    ]


def _bound(facts: Facts, notes: Sequence[str]) -> Markup:
    ours, bound_s = facts.ours, facts.bound_s
    over = ours.step_s / bound_s - 1 if bound_s else 0.0
    numbers = {
        "lower bound": duration(bound_s),
        "evenload" if facts.remapped else "stock": duration(ours.step_s),
        "above the bound": number(over, percent(max(0.0, over))),
    }
    if any(one.plan.bound_s for one in ours.steps):
        even = "the bound is all work, spread evenly over all ranks."
        if facts.context.layout.pp > 1:
            even = "the bound is the work of the busiest stage, after its first micro-batch has arrived."
        says = [_CERTIFIED, f"Here {f'{_sequence_bound(notes)}. {_REMEDY}' if any(notes) else even}"]
    else:
        says = ["The bound is this plan's own work, padding included, spread evenly over all ranks."]
    return section("bound", "How much is left", *map(say, says), figures(numbers))


def _tables(facts: Facts) -> Markup:
    against = "speedup" if facts.remapped else "of stock's"
    multiple = "evenload's speedup over that planner" if facts.remapped else "as a multiple of stock's"
    head = ("", "step", against, "imbalance", "padding", "waiting", "exposed", "holds")
    rows = [
        (
            one is facts.ours,
            one.label,
            [
                duration(one.step_s),
                factor(one.step_s / facts.ours.step_s),
                number(one.imbalance, f"{one.imbalance:.3f}"),
                share(one.padding_frac),
                share(one.bubble_frac),
                share(one.exposed_frac),
                size(one.peak_bytes),
            ],
        )
        for one in reversed(facts.ranked)
    ]
    text = (
        f"Step: mean seconds of a step, then {multiple}. Imbalance: busiest rank over mean, 1 is even. "
        "Waiting: for ranks and stages. "
        "Exposed: communication that no compute hides."
    )
    steps = [_steps(facts)] if len(facts.bounds_s) > 1 else []
    return section("table", "All planners, all steps", say(text), _table("planners", head, rows), *steps)


def _steps(facts: Facts) -> Markup:
    shown, steps = facts.shown[::-1], facts.forecast.steps
    head = ["", *(one.label for one in shown), "lower bound", "planning, measured"]
    rows = []
    for place, step in enumerate(steps[:_MOST_STEPS]):
        cells = [one.steps[place].outcome.step_s for one in shown]
        rows.append((False, f"step {place}", [duration(s) for s in (*cells, step.bound_s, step.plan_s)]))
    more = len(steps) - _MOST_STEPS
    left = [say(f"{more} more steps are in the table of --json.")] if more > 0 else []
    return join(_table("steps", head, rows), *left)


def _of_plugin(table: ResultTable) -> Markup:
    """A table that a plugin shows of the plan."""
    lines = [say(f"{line[0].upper()}{line[1:]}.") for line in table.caption.splitlines()]
    rows = [(False, name, [tag("span", str(cell)) for cell in cells]) for name, *cells in table.rows]
    name = table.title
    return section(name, name.capitalize(), *lines, _table(f"{name}-rows", table.head, rows))


def _loads(facts: Facts) -> Markup:
    if facts.forecast.loads is None:
        return join()
    loads, columns = facts.forecast.loads.to_json(), ("imbalance_p50", "imbalance_p95", "imbalance_max")
    head = ("", "busiest rank, median", "95th percentile", "most", "copies", "weights", "slots", "planning, measured")
    rows = [
        (
            not place,
            name,
            [
                *(number(row[column], f"{row[column]:.4f}") for column in columns),
                number(row["copies"], f"{row['copies']:.2f}"),
                number(row["copied_bytes"], mib(row["copied_bytes"])),
                number(row["slots"], str(row["slots"])),
                duration(1e-3 * row["plan_ms_measured"]),
            ],
        )
        for place, (name, row) in enumerate(loads["planners"].items())
    ]
    text = (
        f"Predicted from {loads['passes']:,} passes of {loads['file']}, in groups of {loads['ep']} ranks. Busiest "
        "rank: its tokens over the mean rank's, 1 is even. Copies: of experts in a layer, on all ranks of a group. "
        "Weights: that they move forward. Slots: the most copies of a rank."
    )
    return section("loads", "Experts", *map(say, (text, *loads["notes"])), _table("layers", head, rows))


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


def _fine_print(facts: Facts) -> Markup:
    context, forecast, steps = facts.context, facts.forecast, facts.forecast.steps
    layout = ", ".join(f"{name} {size}" for name, size in vars(context.layout).items())
    plan_s = seconds(float(np.mean([step.plan_s for step in steps])))
    num_drawn = sum(len(step.ours.plan.lengths) for step in steps)
    lines: dict[str, str] = {
        "ranks": f"{context.layout.world_size:,}: {layout}",
        "cluster": f"{context.cluster.name}: {context.cluster.source}",
        "costs": context.costs.source,
        "plugins": ", ".join(plugin.name for plugin in forecast.recipe.enabled()) or "none",
        "samples": f"{len(forecast.lengths):,} in the file, {num_drawn:,} in the steps shown",
        "planning": f"{plan_s} a step on average, measured where this page was made",
        "command": tag("code", command()),
    }
    late = float(np.mean([step.delay_steps for step in steps]))
    if late:
        lines["late"] = f"tokens are trained {late:.2g} steps late on average"
    rows = [cell for name, text in lines.items() for cell in (tag("dt", name), tag("dd", text))]
    text = (
        "Everything on this page is predicted, except the time that planning took."
        if facts.forecast.times == "predicted"
        else "Times are measured where this page was made. Predicted are the lower bound, which share of a pass is "
        "padding, and what ranks hold."
    )
    return section("fine", "Fine print", say(text), tag("dl", *rows, class_="fine"))


def _sequence_bound(notes: Sequence[str]) -> str:
    bounding = [note for note in notes if note]
    if len(notes) == 1:
        return bounding[0]
    return f"one sequence alone bounds {len(bounding)} of {len(notes)} steps (in the first of them, {bounding[0]})"
