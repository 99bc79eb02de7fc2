"""What a person sees of `search`."""

from __future__ import annotations

import yaml
from rich.console import Group, RenderableType

from ...commands.tables.show import Columns, Result, column, grid
from ...commands.tables.sweep import degrees
from ...core.errors import shorten
from ...core.input.format import gib, percent, seconds
from ...training.forecast.sweep import written
from .answer import said

_SETTING: Columns = {
    "step time": column("step_s", seconds),
    "tokens/s": column("tokens_per_s", "{:,.0f}".format),
    "bubble": column("bubble_frac", percent),
    "exposed": column("exposed_frac", percent),
    "holds": column("peak_bytes", gib),
}

_TAKEN = {"measured_s": "measured", "predicted_s": "predicted", "refitted_s": "with refitted costs"}


def table(result: Result) -> Group:
    """The best settings, what holds each value of an axis back, and layouts next to those of a table of rules."""
    rows, gap = result["rows"], result["gap"]
    layouts = [_layout(row) for row in rows]
    cells = [
        [
            place + 1,
            layouts[place],
            said({key: value for key, value in row["settings"].items() if not key.startswith("parallel.")}) or "-",
            *(cell(row) for cell in _SETTING.values()),
            "tie" if row["tie"] and place else "",
        ]
        for place, row in enumerate(rows)
    ]
    certificate = "nothing fits yet" if gap is None else _certificate(result)
    title = f"the best settings of {result['ranks']} ranks, predicted, {result['batches']} batch(es)"
    tables: list[RenderableType] = [
        grid(title, ["", "layout", "settings", *_SETTING, ""], cells, certificate, bold=0, spare=("exposed", "bubble"))
    ]
    axes = [[line["key"], written(line["value"]), *_beside_best(line), shorten(line["why"])] for line in result["axes"]]
    tables.append(grid("by axis", ["key", "value", "over the best", "", "or why not"], axes, spare=("or why not",)))
    by_hand = [
        [f"tp{row['tp']} pp{row['pp']} ep{row['ep']} dp{row['dp']}", seconds(row["step_s"]), f"{row['over_best']:.2f}x",
         "of the table of rules" if row["by_hand"] else ""]
        for row in result["layouts"]
    ]  # fmt: skip
    tables.append(grid("layouts that were planned", ["layout", "step time", "over the best", ""], by_hand))
    if replicas := result["replicas"]:
        tables.append(_replicas(replicas))
    if measured := result["measured"]:
        some = [
            [said(row["settings"]), *(seconds(row[key]) if row[key] else "-" for key in _TAKEN)] for row in measured
        ]
        tables.append(grid("trained here", ["settings", *_TAKEN.values()], some))
    if front := result["front"]:
        some = [[row["ranks"], _layout(row), seconds(row["step_s"]), f"{row['tokens_per_s']:,.0f}"] for row in front]
        tables.append(grid("by number of ranks", ["ranks", "layout", "step time", "tokens/s"], some))
    return Group(*tables)


def _replicas(replicas: Result) -> RenderableType:
    shapes = "; ".join(degrees(one) or "1 rank" for one in replicas["replicas"])
    cells = [["unlike", shapes, seconds(replicas["step_s"])], ["one shape", "", seconds(replicas["one_shape_s"])]]
    about = "one shape is as fast"
    if replicas["faster"]:
        flow = yaml.safe_dump({"replicas": replicas["replicas"]}, default_flow_style=True, sort_keys=False, width=1000)
        about = f"as a recipe has them: parallel: {flow.strip()}"
    return grid("replicas for tenants, predicted", ["", "replicas", "step time"], cells, about)


def _layout(row: Result) -> str:
    of_layout = {key.removeprefix("parallel."): value for key, value in row["settings"].items() if "parallel." in key}
    return degrees(of_layout) or "dp alone"


def _beside_best(line: Result) -> tuple[str, str]:
    if line["over_best"] is None:
        return "-", ""
    over = line["over_best"]
    bound = f"at least {over - 1:.1%} slower" if over >= 1 else f"at most {1 / over - 1:.1%} faster"
    return f"{over:.3f}x", "" if line["is"] == "planned" else f"by its bound {bound}"


def _certificate(result: Result) -> str:
    """How far from the best of the space the first row may be, and why."""
    counts = {name: f"{result[name]:,}" for name in ("settings", "planned", "by_bound", "by_memory", "refused")}
    lines = [
        f"nothing in this space is more than {result['gap']:.1%} faster in this model: "
        + "{settings} settings, {planned} planned, {by_bound} excluded by their bound, {by_memory} by memory, "
        "{refused} refused".format(**counts),
        f"{seconds(result['search_s'])}, the first answer after {seconds(result['first_answer_s'])}",
    ]
    if not result["activations_counted"]:
        lines.append("the costs know no bytes of activations: weights, gradients and optimizer alone take memory")
    lines += [f"of the settings above: {note}" for note in result["not_measured"]]
    if more := result["more_memory"]:
        lines.append(
            f"with {gib(more['lacking_bytes'])} more on each device {said(more['settings'])} might give "
            f"a speedup of {more['gain_at_most']:.2f}x at the most"
        )
    if result["out"]:
        lines.append(f"the best one as a recipe: {result['out']}")
    return "\n".join(lines)
