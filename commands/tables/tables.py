"""The result of each verb as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.input.format import gib, mib, percent, seconds
from ...core.plan.grid import LEGEND
from ...core.planning.chain import WARNINGS
from ...training.forecast.sweep import said, written
from .expert_loads import table as table_of_loads
from .installation import tables as tables_of_installation
from .shared_plan import table as table_of_tenants
from .show import grid, plain
from .tenants import tables as tables_of_tenants
from .training import table as table_of_run
from .validation import tables as tables_of_validation

Result = dict[str, Any]
Cell = Callable[[Any], Any]
"""What a column shows of a row."""
Columns = Mapping[str, Cell]
"""Cells by the head of their column."""

_MOST_ROWS = 32
"""Of a table with a row a rank."""
_MOST_FAULTS = 8
"""Of a table of what is wrong; --json has all."""


def _of(key: str, show: Cell = lambda value: value) -> Cell:
    return lambda row: show(row[key])


def _table(title: str, columns: Columns, rows: Iterable[Any], caption: str = "", bold: int | None = None) -> Table:
    return grid(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], caption, bold)


_VARIANT: Columns = {
    "": _of("name"),
    "tokens/s": _of("tokens_per_s"),
    "imbalance": _of("imbalance"),
    "padding": _of("padding_frac", percent),
    "idle": _of("bubble_frac", percent),
    "worst rank": _of("bubble_worst", percent),
    "step": _of("step_s", seconds),
    "predicted": _of("predicted_s", seconds),
    "last loss": _of("loss"),
}


def train(result: Result) -> Group:
    """A row a variant, a row a rank of each recorded one, what the run came to; with baselines, what it showed. Of a
    run of tenants, a row each."""
    if "tenants" in result:
        return tables_of_tenants(result)
    bubbles = [_bubbles(name, rows) for name, rows in result["bubbles"].items()]
    shown = closing(result["comparison"], result["host"])
    held_out = tables_of_validation(result["validation"])
    variants = [_variants(result)] if result["summary"]["steps"] else []
    return Group(*variants, *bubbles, *held_out, table_of_run(result["summary"]), *shown)


def _variants(result: Result) -> Table:
    ratio = result["ratio"]
    columns = dict(_VARIANT)
    if ratio:  # without baselines nothing is faster
        columns["evenload is faster by"] = lambda row: f"{ratio[row['name']]:.2f}x" if row["name"] in ratio else ""
    caption = (
        f"imbalance: busiest rank over mean, measured; planning took {percent(result['plan_share'])} of the step\n"
        "idle: share of the step outside forward and backward, mean and worst rank; predicted: the simulator's step"
    )
    if result["trace"]:
        caption += f"\n{result['trace']} shows measured and predicted steps: open it in ui.perfetto.dev"
    if result["delay_steps"] or result["waiting"]:
        caption += f"\ntokens were trained {result['delay_steps']:.2g} steps late in the mean"
        caption += f"; {result['waiting']} samples still wait"
    if result["pictures"]:
        caption += f"\n{' and '.join(result['pictures'].values())} show the measured steps, rank by rank"
    rows = [{"name": name, **variant} for name, variant in result["variants"].items()]
    return _table(f"training on {_machine(result)}", columns, rows, caption)


_BUBBLE: Columns = {
    "": lambda row: f"stage {row['stage']}, rank {row['rank']}",
    "bubble": _of("bubble_frac", percent),
    "predicted": _of("predicted_bubble_frac", percent),
    "before its first pass": _of("before_frac", percent),
    "between passes": _of("between_frac", percent),
    "after its last pass": _of("after_frac", percent),
}


def _bubbles(name: str, rows: list[Result]) -> Table:
    """What each rank of each stage waits, in the order of ranks; of many the ones that wait most."""
    shown = sorted(rows, key=lambda row: -row["bubble_frac"])[:_MOST_ROWS]
    shown.sort(key=lambda row: (row["stage"], row["rank"]))
    caption = "shares of the traced steps in which a rank waits for other ranks and stages, measured"
    if len(rows) > len(shown):
        caption += f"\n{len(shown)} of {len(rows)} that wait most; all are in --json and in the trace's otherData"
    return _table(f"bubbles of {name}", _BUBBLE, shown, caption)


def closing(comparison: Result, host: Result) -> list[Text]:
    """One line that says what the alternating steps showed and what they did not; none without baselines."""
    if not comparison:
        return []
    steps = next(iter(comparison.values()))["steps"]
    losses = [one["loss_rel_diff"] for one in comparison.values() if one.get("loss_rel_diff") is not None]
    alike = f"; losses differ by at most {max(losses):.1e} of their size" if losses else ""
    missing = "other layouts and data, gradients (evenload verify)"
    if host.get("device") == "cpu":
        missing = f"GPUs, {missing}"
    if all(one["interval"] is None for one in comparison.values()):
        shown = f"no difference, as {steps} alternating steps are too few to tell (6 at least)"
    else:
        verdicts = ", ".join(_verdict(name, one) for name, one in comparison.items())
        shown = f"over {steps} alternating steps (median, 95 % interval) evenload is {verdicts}"
    return [plain(f"Shown: {shown}{alike}. Not shown: {missing}.", "bold")]


def _verdict(name: str, compared: Result) -> str:
    """evenload beside one baseline; a difference within the noise is none."""
    if compared["same_plans"]:
        return f"{name} itself, whose plan it runs in every step"
    low, high = compared["interval"]
    if low <= 1 <= high:
        return f"as fast as {name} within the noise ({low:.2f}x to {high:.2f}x)"
    return f"{compared['median']:.2f}x as fast as {name} ({low:.2f}x to {high:.2f}x)"


def bench(result: Result) -> Group:
    """A row a variant, then what the run showed."""
    return Group(_bench(result), *closing(result["ratio"], result["host"]))


_BENCHED: Columns = {
    "": _of("name"),
    "tokens/s": _of("tokens_per_s"),
    "imbalance": _of("imbalance"),
    "padding": _of("padding_frac", percent),
    "bubble": _of("bubble_frac", percent),
    "holds": _of("peak_activation_bytes", gib),
    "evenload is faster by": _of("ratio", lambda ratio: f"{ratio['of_totals']:.3f}x" if ratio else ""),
    "quartiles of steps": _of("ratio", lambda ratio: "{:.3f} .. {:.3f}".format(*ratio["quartiles"]) if ratio else ""),
    "its busiest rank": _of("ratio", lambda ratio: f"{ratio['of_busiest']:.3f}x" if ratio else ""),
    "of its ceiling": _of("ratio", lambda ratio: percent(ratio["of_ceiling"]) if ratio else ""),
}
_BY_NAME = ("tokens_per_s", "imbalance", "padding_frac", "bubble_frac", "peak_activation_bytes")


def _bench(result: Result) -> Table:
    rows = [
        {"name": name, "ratio": result["ratio"].get(name), **{key: result[key][name] for key in _BY_NAME}}
        for name in result["tokens_per_s"]
    ]
    peaks_of = result["predicted_peak_activation_bytes_of_stages"]
    caption = (
        f"{result['steps']} steps, alternating, measured; planning took {percent(result['plan_share'])} of a step\n"
        "its busiest rank: compute of the baseline's over evenload's; ceiling: the baseline's own imbalance, what "
        "balance alone can gain (a smaller bubble comes on top)\n"
        f"{_paths(result)}predicted step times are off by {_errors(result['prediction_error'])} in the mean\n"
        "bubble: share of the steps in which ranks wait for other ranks and stages, measured (predicted: "
        f"{_errors(result['predicted_bubble_frac'])})\n"
        "holds: the most that passes of one step hold on any rank, above the level before it, measured (predicted: "
        f"{', '.join(f'{gib(max(peaks))} ({name})' for name, peaks in peaks_of.items())})"
    )
    return _table(f"bench on {_machine(result)}", _BENCHED, rows, caption)


def _paths(result: Result) -> str:
    """The critical paths of ranks that divide experts, if there are any."""
    if "critical_path" not in result:
        return ""
    words = [
        f"{name} {path['critical_s']:.3g} s, with even experts {path['evened_experts_s']:.3g} s"
        for name, path in result["critical_path"].items()
    ]
    return f"critical path through layers with experts, compute alone: {'; '.join(words)}\n"


def verify(result: Result) -> Group:
    """What was compared and by how much it was off, then the branches that the steps took."""
    resumed = result["resumed"]
    layout = "on tp {tp}, pp {pp}, dp {dp}, after {at_step} steps".format(**resumed) if resumed else "not verified"
    faults = [*result["planners_failed"], *result["over"], *(f"not finite: {name}" for name in result["not_finite"])]
    rows = [
        ("loss, relative error", _error(result["loss_rel_err"])),
        ("gradients, relative error of the worst parameter", _error(result["grad_rel_err"])),
        ("  that parameter, and what is allowed", f"{result['worst_parameter']}  {result['tolerance']:.1e}"),
        ("norm of the gradient, relative error", _error(result["norm_rel_err"])),
        ("weights and moments after updates, relative error", _error(result["update_rel_err"])),
        ("resumed", layout),
        ("samples that are not those of an undisturbed run", result["samples_wrong"]),
        ("tokens missing, repeated", f"{result['tokens_missing']}, {result['tokens_repeated']}"),
        *(("beyond what is allowed" if not place else "", fault) for place, fault in enumerate(faults[:_MOST_FAULTS])),
        *((f"not exercised: plugins.{name}", lacking) for name, lacking in result["not_exercised"].items()),
        ("verdict", "exact" if result["exact"] else "NOT exact"),
    ]
    more = result["batches"] - result["steps"]
    caption = f"{result['steps']} steps" + (f" and {more} batches for further branches" if more else "")
    caption += f", {result['tokens']:,} tokens, {result['targets']:,} of them targets, planned by {result['planner']}"
    branches = [(name, str(count)) for name, count in result["branches"].items()]
    untaken = "no step has taken it" if "tenants" in result else "no batch of these data takes it"
    branches += [(name, untaken) for name in result["branches_not_taken"]]
    tenants = [_table("each tenant beside itself alone", _PROVED, result["tenants"], "")] if "tenants" in result else []
    return Group(
        grid(f"evenload against plain training on {_machine(result)}", ("", ""), rows, caption),
        *tenants,
        grid("branches of the runtime that were proved", ("branch", "times"), branches, ""),
    )


_PROVED: Columns = {
    "tenant": _of("name"),
    "rank": _of("r"),
    "steps": _of("steps"),
    "loss": _of("loss_rel_err", lambda value: _error(value)),
    "gradients": _of("grad_rel_err", lambda value: _error(value)),
    "after updates": _of("update_rel_err", lambda value: _error(value)),
    "verdict": _of("exact", lambda exact: "exact" if exact else "NOT exact"),
}


def _error(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"


_STEP: Columns = {
    "step": _of("step"),
    "planning": _of("plan_s", seconds),
    "step time": _of("step_s", seconds),
    "over bound": lambda step: percent(max(0.0, step["step_s"] / step["bound_s"] - 1)),
    "imbalance": _of("imbalance"),
    "padding": _of("padding_frac", percent),
    "bubble": _of("bubble_frac", percent),
    "exposed": _of("exposed_frac", percent),
    "micro-batches F, B": _of("micro_batch_imbalance", lambda uneven: _DIRECTIONS.format(**uneven)),
    "holds": _of("peak_bytes", gib),
}
_DIRECTIONS = "{forward:.3f}, {backward:.3f}"


def plan(result: Result) -> Group:
    """A row a step, then a row a planner over all steps."""
    steps = result["steps"]
    notes = {note for step in steps for note in step["notes"] if not note.startswith("micro-batches")}
    shown = sorted(notes, key=lambda note: (not note.startswith(WARNINGS), note))
    about = [
        f"all times predicted; costs: {result['costs']}; cluster: {result['cluster']}",
        "bubble: waiting for ranks and stages; exposed: communication that no compute hides",
        "micro-batches F, B: costliest over mean, forward and backward; holds: the most of a rank, optimizer included",
    ]
    if (ep := result["layout"]["ep"]) > 1:
        about.append(f"experts: groups of {ep} ranks run every pass together; routing is taken to be even")
    pipelines = [step["pipeline"] for step in steps if step["pipeline"]]
    programs = [
        plain(f"\nstep {step['step']}: {LEGEND}\n" + "\n".join(step["program"])) for step in steps if "program" in step
    ]
    table = _table("plan", _STEP, steps, "\n".join([*about, *shown[:3]]))
    loads = [table_of_loads(result["loads"])] if "loads" in result else []
    tenants = [table_of_tenants(result["tenants"])] if "tenants" in result else []
    pipeline = [_pipeline(pipelines)] if pipelines else []
    return Group(table, *pipeline, _planners(steps), *tenants, *loads, *programs)


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


def _sum(rows: Iterable[Result], key: str) -> Any:
    return sum(row[key] for row in rows)


def _most(rows: Iterable[Result], key: str) -> Any:
    return max(row[key] for row in rows)


def _layers(again: int, layers: int) -> str:
    return f"{again:,} of {layers:,}" + (f": {percent(again / layers)}" if again else "")


def _pipeline(steps: list[Result]) -> Table:
    """A row a stage, over all steps."""
    micro_batches, cut, chunks = (_sum(steps, key) for key in ("micro_batches", "cut_sequences", "chunks"))
    most = _most(steps, "most_chunks")
    cuts = f"{cut:,} sequences are cut into {chunks:,} chunks, at most {most} each" if cut else "no sequence is cut"
    caption = (
        f"predicted; {micro_batches:,} micro-batches; {cuts}\n"
        "layers recomputed: of a stage's layers times micro-batches; in flight: micro-batches between forward and "
        "backward, the most of a rank\n"
        "weight gradients apart: backwards that leave them to a pass of their own\n"
        "activations: the most of a rank, what plugins.*.activation_gib caps; holds: with weights and optimizer"
    )
    return _table("pipeline", _STAGE, zip(*(step["stages"] for step in steps), strict=True), caption)


_COMBINATION: Columns = {
    "ranks": _of("world_size", str),
    "layout": _of("layout", lambda degrees: " ".join(f"{k}{size}" for k, size in degrees.items() if size > 1) or "dp1"),
    "step time": _of("step_s", seconds),
    "tokens/s": _of("tokens_per_s", "{:,.0f}".format),
    "a rank": _of("tokens_per_s_per_rank", "{:,.1f}".format),
    "imbalance": _of("imbalance", "{:.3f}".format),
    "bubble": _of("bubble_frac", percent),
    "exposed": _of("exposed_frac", percent),
    "holds": lambda row: gib(row["peak_bytes"]) + ("" if row["fits"] else ": too much"),
    "gain over": _of("strongest_baseline", lambda baseline: "{name} {gain:.2f}x".format(**baseline)),
    "planning": _of("plan_s", seconds),
}


def sweep(result: Result) -> Table:
    """A row a combination, the best one bold and with a star."""
    keys, best = result["keys"], result["best"]
    rows, reasons = [], []
    for place, row in enumerate(result["rows"]):
        if "error" in row:
            cells = ["", "impossible", *[""] * (len(_COMBINATION) - 2)]
            reasons.append(f"{said(row['settings'])}: {row['error']['what']} ({row['error']['found']})")
        else:
            cells = [cell(row) for cell in _COMBINATION.values()]
        rows.append(["*" if place == best else "", *(written(row["settings"][key]) for key in keys), *cells])
    marked = "*: most tokens/s a rank among those that fit" if best is not None else "none fits into memory"
    about = f"predicted, means of {result['steps']} step(s); {marked}; gain: over the fastest baseline of the row"
    return grid("what if", ["", *keys, *_COMBINATION], rows, "\n".join([about, *reasons]), bold=best)


def _planners(steps: list[Result]) -> Table:
    """evenload beside the baselines that planned every step: sums of seconds, means of the rest."""
    named: dict[str, list[Result]] = {"evenload": steps}
    for name in steps[0]["baselines"]:
        if all(name in step["baselines"] for step in steps):
            named[name] = [step["baselines"][name] for step in steps]
    ours_s = _sum(steps, "step_s")
    rows, over = [], []
    for name, row in named.items():
        total_s = _sum(row, "step_s")
        uneven = {k: sum(s["micro_batch_imbalance"][k] for s in row) / len(row) for k in ("forward", "backward")}
        ignored, broken = (next((s[key] for s in row if s.get(key)), None) for key in ("ignores", "over_caps"))
        if ignored:
            over.append(f"{name} is not allowed: {ignored}")
        elif broken and total_s < ours_s:
            over.append(f"{name} is faster, but may not be run: {broken}")
        rows.append(
            (
                ("stock (padded)" if name == "padded" else name) + (": not allowed" if ignored else ""),
                seconds(total_s),
                f"{total_s / ours_s:.2f}x",
                _sum(row, "imbalance") / len(row),
                percent(_sum(row, "bubble_frac") / len(row)),
                _DIRECTIONS.format(**uneven),
                gib(_most(row, "peak_bytes")),
            )
        )
    head = ("", "all steps", "against evenload", "imbalance", "bubble", "micro-batches F, B", "holds")
    return grid("planners", head, rows, "\n".join(["predicted", *over]))


def profile(result: Result) -> Group:
    """Coefficients of the passes, then the links."""
    keys = {"launch_s": "s a launch", "token_s": "s a token", "expert_s": "s a token at experts"}
    keys["pair_s"] = "s a (query, key) pair"
    if not any(c["expert_s"] for c in result["passes"].values()):
        del keys["expert_s"]
    rows = [
        (name, *(f"{c[key]:.3g}" for key in keys), percent(result["fit_error"][name]))
        for name, c in result["passes"].items()
    ]
    head = ("", *keys.values(), "error of the fit")
    caption = (
        f"update: {seconds(result['update_s'])}; steps of {result['ranks']} rank(s), simulated with these costs, are "
        f"off by {percent(result['fit_error']['step'])} in the mean; written to {result['out']}"
    )
    passes = grid(f"costs of {_machine(result)}", head, rows, caption)
    if not result["links"]:
        return Group(passes)
    links = [
        (name, seconds(link["latency_s"]), f"{link['bytes_per_s'] / 1e9:.3g} GB/s", _errors(link["fit_error"]))
        for name, link in result["links"].items()
    ]
    return Group(passes, grid("links", ("", "latency", "bandwidth", "error of the fit"), links))


def _errors(errors: dict[str, float]) -> str:
    return ", ".join(f"{percent(error)} ({name})" for name, error in errors.items())


def export(result: Result) -> Table:
    rows = [(name, mib(size)) for name, size in result["files"].items()]
    caption = f"{result['tensors']} tensors, {mib(result['bytes'])} in {seconds(result['seconds'])}"
    return grid(f"{result['folder']}, of step {result['step']}", ("file", "size"), rows, caption)


def lora(result: Result) -> Group:
    """A row a tenant, then a table a sweep."""
    return tables_of_tenants(result)


def doctor(result: Result) -> Group:
    """What is installed, attention by path, plugins by loop."""
    return tables_of_installation(result)


def plugins(result: Result) -> Table:
    rows = [(p["name"], p["summary"], "; ".join(p["papers"]), p["origin"]) for p in result["plugins"]]
    return grid("plugins", ("name", "what it does", "papers", "from"), rows)


def recipes(result: Result) -> Table:
    rows = [(r["name"], r["trainer"], str(r["ranks"]), ", ".join(r["plugins"])) for r in result["recipes"]]
    return grid("recipes", ("name", "trainer", "ranks at least", "plugins"), rows, "every command takes these names")


def check(result: Result) -> Group:
    """A row a plugin, what the step holds, and the verdict."""
    refused = [f"{one['what']} ({one['found']})" for one in result["refusals"]]
    rows = [(row["name"], *_standing(row, refused)) for row in result["plugins"]]
    shown = _checked_step(result["step"]) if result["step"] else []
    verdict = plain(f"{result['verdict']}: {result['says']}", "bold")
    return Group(grid("check", ("plugin", "", "gain"), rows), *shown, verdict)


def _standing(row: Result, refusals: list[str]) -> tuple[str, str]:
    if row["on"]:
        return "on", f"{row['gain']:.2f}x"
    why = [row["refused"]] if row["refused"] else refusals
    return (f"refused: {'; '.join(why)}" if why else "nothing planned"), ""


def _checked_step(step: Result) -> list[Table | Text]:
    """The table of a step, and the remarks below it."""
    rows = [
        ("samples, tokens", f"{step['samples']:,}, {step['tokens']:,}"),
        ("shortest, longest sample", f"{min(step['lengths']):,}, {max(step['lengths']):,} tokens"),
        ("padded tokens, before and after", f"{step['stock_padded_tokens']:,}, {step['padded_tokens']:,}"),
        ("step, before and after, predicted", f"{seconds(step['stock_step_s'])}, {seconds(step['step_s'])}"),
        ("gain, predicted", f"{step['gain']:.2f}x"),
    ]
    remarks = [
        "gain: predicted from the lengths of this step; of a plugin: over the step with the plugins before it alone",
        "before: micro-batches of the loop's own size, each padded to its longest sample",
        *step["notes"][:_MOST_FAULTS],
    ]
    table = grid(f"first step, {step['loop']}, {step['ranks']} data-parallel ranks", ("", ""), rows)
    return [table, plain("\n".join(remarks), "table.caption")]


def _machine(result: Result) -> str:
    host = result["host"]
    return ", ".join(str(host[key]) for key in ("trainer", "layout", "dtype", "attention", "device") if key in host)
