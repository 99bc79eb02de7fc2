"""Steps of a plan, predicted, next to those of every baseline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.input.format import gib, mib, percent, seconds
from ...core.plan.grid import LEGEND
from ...core.planning.gains import NOTHING
from ...core.planning.notes import WARNINGS
from .show import Columns, Result, by_columns, column, grid, of_plugins, plain
from .train import SPEEDUP

_STEP: Columns = {
    "step": column("step"),
    "planning": column("plan_s", seconds),
    "step time": column("step_s", seconds),
    "over bound": lambda step: percent(max(0.0, step["step_s"] / step["bound_s"] - 1)),
    "imbalance": column("imbalance"),
    "padding": column("padding_frac", percent),
    "bubble": column("bubble_frac", percent),
    "exposed": column("exposed_frac", percent),
    "holds": column("peak_bytes", gib),
}
_STAGE: Columns = {
    "": lambda steps: f"stage {steps[0]['stage']}",
    "layers recomputed": lambda steps: _layers(_sum(steps, "recomputed_layers"), _sum(steps, "layers")),
    "weight gradients apart": lambda steps: _sum(steps, "weight_passes"),
    "in flight": lambda steps: _most(steps, "in_flight"),
    "bubble": lambda steps: percent(_sum(steps, "bubble_frac") / len(steps)),
    "activations": lambda steps: gib(_most(steps, "peak_activation_bytes")),
    "holds": lambda steps: gib(_most(steps, "peak_bytes")),
}
"""Of one stage in all steps."""
_LOADS: Columns = {
    "": column("name"),
    "busiest rank, p50": column("imbalance_p50", "{:.4f}".format),
    "p95": column("imbalance_p95", "{:.4f}".format),
    "most": column("imbalance_max", "{:.4f}".format),
    "copies": column("copies", "{:.2f}".format),
    "weights": column("copied_bytes", mib),
    "slots": column("slots"),
    "a layer": column("layer_ms", lambda ms: None if ms is None else seconds(1e-3 * ms)),
    "for copies": column("exposed_ms", lambda ms: None if ms is None else seconds(1e-3 * ms)),
    "planning": column("plan_ms_measured", lambda ms: seconds(1e-3 * ms)),
    "looks back": column("late_steps", lambda steps: f"{steps} steps" if steps else None),
}


def table(result: Result) -> Group:
    """A row a step, then a row a planner over all steps."""
    steps = result["steps"]
    notes = {note for step in steps for note in step["notes"] if not note.startswith("micro-batches")}
    shown = sorted(notes, key=lambda note: (not note.startswith(WARNINGS), note))
    about = [
        f"all times predicted; costs: {result['costs']}; cluster: {result['cluster']}",
        "bubble: waiting for ranks and stages; exposed: communication that no compute hides",
        f"holds: the most of a rank, {_holds(result)}",
    ]
    if result["costs_differ"]:
        about.insert(1, result["costs_differ"])
    if layers := result["layout"].get("layers"):
        about.append(f"layers of the pipeline's stages: {', '.join(map(str, layers))}")
    if result["layout"].get("cp", 1) > 1:
        about.append("parallel.cp is predicted only; to train with long sequences on several ranks use plugins.mesh")
    if (ep := result["layout"]["ep"]) > 1:
        about.append(f"experts: groups of {ep} ranks run every pass together; routing is taken to be even")
    pipelines = [step["pipeline"] for step in steps if step["pipeline"]]
    programs = [
        plain(f"\nstep {step['step']}: {LEGEND}\n" + "\n".join(step["program"])) for step in steps if "program" in step
    ]
    shown_steps = by_columns("plan", _STEP, steps, "\n".join([*about, *shown[:3]]), spare=("padding", "exposed"))
    loads = [_loads(result["loads"])] if "loads" in result else []
    own = of_plugins("plan", result)
    pipeline = [_pipeline(pipelines, _holds(result))] if pipelines else []
    trees = [_trees(steps)] if "trees" in steps[0] else []
    return Group(shown_steps, *pipeline, _planners(steps), *trees, *_unused(result["unused"]), *own, *loads, *programs)


def _holds(result: Result) -> str:
    said = "with weights and optimizer"
    return said if result["fixed_bytes"] else "without weights and optimizer, of which these costs say nothing"


def _unused(rows: list[Result]) -> list[Text]:
    """What plugins that are off would gain, the most first, and what was not planned."""
    lines = []
    for row in sorted(rows, key=lambda row: -row["gain"]):
        names = " and ".join(f"plugins.{name}" for name in row["plugins"])
        if not row["gain"]:
            lines.append(f"{names} is off, and was not planned, as that takes long: switch it on to see what it gains")
        elif row["gain"] > 1 + NOTHING:
            took = f"planned in {seconds(row['plan_s'])} a step"
            lines.append(f"predicted speedup {row['gain']:.2f}x with {names}, off here ({took}); add below plugins:")
            lines += [f"  {line}" for line in row["line"].splitlines()]
    return [plain(line) for line in lines]


def _sum(rows: Iterable[Result], key: str) -> Any:
    return sum(row[key] for row in rows)


def _most(rows: Iterable[Result], key: str) -> Any:
    return max(row[key] for row in rows)


def _layers(again: int, layers: int) -> str:
    return f"{again:,} of {layers:,}" + (f": {percent(again / layers)}" if again else "")


def _pipeline(steps: list[Result], holds: str) -> Table:
    micro_batches, cut, chunks = (_sum(steps, key) for key in ("micro_batches", "cut_sequences", "chunks"))
    most = _most(steps, "most_chunks")
    cuts = f"{cut:,} sequences are cut into {chunks:,} chunks, at most {most} each" if cut else "no sequence is cut"
    caption = (
        f"predicted; {micro_batches:,} micro-batches; {cuts}\n"
        "layers recomputed: of a stage's layers times micro-batches; in flight: micro-batches between forward and "
        "backward, the most of a rank\n"
        "weight gradients apart: backwards that leave them to a pass of their own\n"
        f"activations: the most of a rank, what plugins.*.activation_gib caps; holds: {holds}"
    )
    return by_columns("pipeline", _STAGE, zip(*(step["stages"] for step in steps), strict=True), caption)


def _planners(steps: list[Result]) -> Table:
    """evenload next to the baselines: sums of seconds, means of the rest."""
    named: dict[str, list[Result]] = {"evenload": steps}
    named |= {name: [step["baselines"][name] for step in steps] for name in steps[0]["baselines"]}
    ours_s = _sum(steps, "step_s")
    rows, over = [], []
    for name, row in named.items():
        total_s = _sum(row, "step_s")
        ignored, broken = (next((s[key] for s in row if s.get(key)), None) for key in ("ignores", "over_caps"))
        if ignored:
            over.append(f"{name} is not allowed: {ignored}")
        elif broken and total_s < ours_s:
            over.append(f"{name} is faster, but may not be run: {broken}")
        rows.append(
            (
                ("stock (padded)" if name == "padded" else name) + (": not allowed" if ignored else ""),
                seconds(total_s),
                "" if row is steps else f"{total_s / ours_s:.2f}x",
                _sum(row, "imbalance") / len(row),
                percent(_sum(row, "bubble_frac") / len(row)),
                gib(_most(row, "peak_bytes")),
            )
        )
    head = ("", "all steps", "speedup", "imbalance", "bubble", "holds")
    return grid("planners", head, rows, "\n".join([f"predicted; {SPEEDUP}", *over]))


def _trees(steps: list[Result]) -> Table:
    """The batches as rows and as trees, and what no plan takes less than."""
    every = [step["trees"] for step in steps]
    why = next((one["why_not"] for one in every if one["why_not"]), "")
    tokens, distinct, rows_s = (_sum(every, "rows_tokens"), _sum(every, "distinct_tokens"), _sum(steps, "step_s"))
    rows = [("rows", tokens, rows_s, _sum(steps, "imbalance") / len(steps))]
    if not why:
        imbalance = _sum(every, "imbalance") / len(every)
        rows.append(("trees", _sum(every, "tokens"), _sum(every, "step_s"), imbalance))
    rows.append(("limit", distinct, _sum(every, "limit_s"), None))
    cells = [(name, f"{n:,}", seconds(total_s), f"{rows_s / total_s:.2f}x", even) for name, n, total_s, even in rows]
    caption = (
        f"{tokens / distinct:.1f}x fewer tokens: {tokens:,} tokens of rows, {distinct:,} distinct\n"
        "trees: a prompt is computed once a micro-batch; limit: distinct tokens alone, spread evenly\n"
        "predicted; speedup: over rows"
    )
    about = f"{caption}\ntrees are not planned: {why}" if why else caption
    return grid("trees", ("", "tokens", "all steps", "speedup", "imbalance"), cells, about)


def _loads(loads: dict[str, Any]) -> Table:
    """A row a planner, from the section ``loads`` of ``plan --json``."""
    rows = [{"name": name, **row} for name, row in loads["planners"].items()]
    recorded, steps = loads["recorded"], loads["steps"]
    about = [
        f"predicted, but for planning, from {loads['passes']:,} passes of steps {steps['first']} to {steps['last']}, "
        f"{len(loads['layers'])} layers each; recorded on {recorded['ranks']} ranks, ep {recorded['ep']}",
        "busiest rank: its tokens over those of the mean rank of a group; copies: of experts, on all of its ranks; "
        "weights: that they move forward",
        "a layer: its experts and exchanges, forward and backward, on the recipe's cluster; for copies: what of that "
        "their weights and gradients travel",
        "slots: the most copies of a rank; looks back: chooses copies from loads of steps before, but not the newest",
        *loads["notes"],
    ]
    return by_columns(
        f"experts, ep {loads['ep']}, loads of {loads['file']}",
        _LOADS,
        rows,
        "\n".join(about),
        spare=("slots", "looks back", "weights", "p95"),
    )
