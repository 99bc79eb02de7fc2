"""The result of each verb as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.plan.grid import LEGEND
from ...core.planning.chain import WARNINGS
from ..pictures.words import gib
from ..sweep import said, written
from .show import grid, percent, plain, seconds

Result = dict[str, Any]


_MOST_ROWS = 32
"""Of a table with a row a rank."""
_MOST_FAULTS = 8
"""Of a table of what is wrong; --json has all."""


def train(result: Result) -> Group:
    """A row a variant, then a row a rank of every recorded one; with baselines, what the run showed."""
    bubbles = [_bubbles(name, rows) for name, rows in result["bubbles"].items()]
    return Group(_variants(result), *bubbles, *closing(result["comparison"], result["host"]))


def _variants(result: Result) -> Table:
    rows = [
        (
            name,
            v["tokens_per_s"],
            v["imbalance"],
            percent(v["padding_frac"]),
            percent(v["bubble_frac"]),
            percent(v["bubble_worst"]),
            seconds(v["step_s"]),
            seconds(v["predicted_s"]),
            v["loss"],
            f"{result['ratio'][name]:.2f}x" if name in result["ratio"] else "",
        )
        for name, v in result["variants"].items()
    ]
    head = (
        "",
        "tokens/s",
        "imbalance",
        "padding",
        "idle",
        "worst rank",
        "step",
        "predicted",
        "last loss",
        "evenload is faster by",
    )
    share = result["plan_share"]
    caption = f"imbalance: busiest rank over mean, measured; planning took {percent(share)} of the step"
    caption += (
        "\nidle: share of the step outside forward and backward, mean and worst rank; predicted: the simulator's step"
    )
    if result["trace"]:
        caption += f"\n{result['trace']} shows measured and predicted steps: open it in ui.perfetto.dev"
    if result["delay_steps"] or result["waiting"]:
        caption += f"\ntokens were trained {result['delay_steps']:.2g} steps late in the mean"
        caption += f"; {result['waiting']} samples still wait"
    if result["pictures"]:
        caption += f"\n{' and '.join(result['pictures'].values())} show the measured steps, rank by rank"
    shown = slice(None if result["ratio"] else -1)  # without baselines nothing is faster
    return grid(f"training on {_machine(result)}", head[shown], [row[shown] for row in rows], caption)


def _bubbles(name: str, rows: list[Result]) -> Table:
    """What each rank of each stage waits, in the order of ranks; of many the ones that wait most."""
    shown = sorted(rows, key=lambda row: -row["bubble_frac"])[:_MOST_ROWS]
    shown.sort(key=lambda row: (row["stage"], row["rank"]))
    cells = [
        (
            f"stage {row['stage']}, rank {row['rank']}",
            percent(row["bubble_frac"]),
            percent(row["predicted_bubble_frac"]),
            *(percent(row[f"{part}_frac"]) for part in ("before", "between", "after")),
        )
        for row in shown
    ]
    head = ("", "bubble", "predicted", "before its first pass", "between passes", "after its last pass")
    caption = "shares of the traced steps in which a rank waits for other ranks and stages, measured"
    if len(rows) > len(shown):
        caption += f"\n{len(shown)} of {len(rows)} that wait most; all are in --json and in the trace's otherData"
    return grid(f"bubbles of {name}", head, cells, caption)


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


def _bench(result: Result) -> Table:
    rows = []
    for name, rate in result["tokens_per_s"].items():
        ratio = result["ratio"].get(name)
        rows.append(
            (
                name,
                rate,
                result["imbalance"][name],
                percent(result["padding_frac"][name]),
                percent(result["bubble_frac"][name]),
                gib(result["peak_activation_bytes"][name]),
                f"{ratio['of_totals']:.3f}x" if ratio else "",
                "{:.3f} .. {:.3f}".format(*ratio["quartiles"]) if ratio else "",
                f"{ratio['of_busiest']:.3f}x" if ratio else "",
                percent(ratio["of_ceiling"]) if ratio else "",
            )
        )
    peaks_of = result["predicted_peak_activation_bytes_of_stages"]
    head = (
        "",
        "tokens/s",
        "imbalance",
        "padding",
        "bubble",
        "holds",
        "evenload is faster by",
        "quartiles of steps",
        "its busiest rank",
        "of its ceiling",
    )
    caption = (
        f"{result['steps']} steps, alternating, measured; planning took {percent(result['plan_share'])} of a step\n"
        "its busiest rank: compute of the baseline's over evenload's; ceiling: the baseline's own imbalance, what "
        "balance alone can gain (a smaller bubble comes on top)\n"
        f"predicted step times are off by {_errors(result['prediction_error'])} in the mean\n"
        "bubble: share of the steps in which ranks wait for other ranks and stages, measured (predicted: "
        f"{_errors(result['predicted_bubble_frac'])})\n"
        "holds: the most that passes of one step hold on any rank, above the level before it, measured (predicted: "
        f"{', '.join(f'{gib(max(peaks))} ({name})' for name, peaks in peaks_of.items())})"
    )
    return grid(f"bench on {_machine(result)}", head, rows, caption)


def verify(result: Result) -> Group:
    """What was compared and by how much it was off, then the branches that the steps took."""
    resumed = result["resumed"]
    layout = "on tp {tp}, pp {pp}, dp {dp}, after {at_step} steps".format(**resumed) if resumed else "not verified"
    faults = [*result["over"], *(f"not finite: {name}" for name in result["not_finite"])]
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
        ("verdict", "exact" if result["exact"] else "NOT exact"),
    ]
    more = result["batches"] - result["steps"]
    caption = f"{result['steps']} steps" + (f" and {more} batches for further branches" if more else "")
    caption += f", {result['tokens']:,} tokens, planned by {result['planner']}"
    branches = [(name, str(count)) for name, count in result["branches"].items()]
    branches += [(name, "no batch of these data takes it") for name in result["branches_not_taken"]]
    return Group(
        grid(f"evenload against plain training on {_machine(result)}", ("", ""), rows, caption),
        grid("branches of the runtime that were proved", ("branch", "times"), branches, ""),
    )


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def plan(result: Result) -> Group:
    """A row a step, then a row a planner over all steps."""
    head = (
        "step",
        "planning",
        "step time",
        "over bound",
        "imbalance",
        "padding",
        "bubble",
        "exposed",
        "micro-batches F, B",
        "holds",
    )
    rows = [
        (
            s["step"],
            seconds(s["plan_s"]),
            seconds(s["step_s"]),
            percent(max(0.0, s["step_s"] / s["bound_s"] - 1)),
            s["imbalance"],
            percent(s["padding_frac"]),
            percent(s["bubble_frac"]),
            percent(s["exposed_frac"]),
            _directions(s["micro_batch_imbalance"]),
            gib(s["peak_bytes"]),
        )
        for s in result["steps"]
    ]
    notes = {note for s in result["steps"] for note in s["notes"] if not note.startswith("micro-batches")}
    shown = sorted(notes, key=lambda note: (not note.startswith(WARNINGS), note))
    about = (
        f"all times predicted; costs: {result['costs']}; cluster: {result['cluster']}",
        "bubble: waiting for ranks and stages; exposed: communication that no compute hides",
        "micro-batches F, B: costliest over mean, forward and backward; holds: the most of a rank, optimizer included",
    )
    table = grid("plan", head, rows, "\n".join([*about, *shown[:3]]))
    pipelines = [s["pipeline"] for s in result["steps"] if s["pipeline"]]
    programs = [
        plain(f"\nstep {s['step']}: {LEGEND}\n" + "\n".join(s["program"])) for s in result["steps"] if "program" in s
    ]
    return Group(table, *([_pipeline(pipelines)] if pipelines else []), _planners(result["steps"]), *programs)


def _pipeline(steps: list[Result]) -> Table:
    """A row a stage, over all steps."""
    stages = zip(*(step["stages"] for step in steps), strict=True)
    rows = []
    for number, each in enumerate(stages):
        again, layers = (sum(one[key] for one in each) for key in ("recomputed_layers", "layers"))
        rows.append(
            (
                f"stage {number}",
                f"{again:,} of {layers:,}" + (f": {percent(again / layers)}" if again else ""),
                sum(one["weight_passes"] for one in each),
                max(one["in_flight"] for one in each),
                percent(sum(one["bubble_frac"] for one in each) / len(each)),
                gib(max(one["peak_activation_bytes"] for one in each)),
                gib(max(one["peak_bytes"] for one in each)),
            )
        )
    micro_batches, cut, chunks = (sum(s[key] for s in steps) for key in ("micro_batches", "cut_sequences", "chunks"))
    most = max(s["most_chunks"] for s in steps)
    cuts = f"{cut:,} sequences are cut into {chunks:,} chunks, at most {most} each" if cut else "no sequence is cut"
    caption = (
        f"predicted; {micro_batches:,} micro-batches; {cuts}\n"
        "layers recomputed: of a stage's layers times micro-batches; in flight: micro-batches between forward and "
        "backward, the most of a rank\n"
        "weight gradients apart: backwards that leave them to a pass of their own\n"
        "activations: the most of a rank, what plugins.*.activation_gib caps; holds: with weights and optimizer"
    )
    head = ("", "layers recomputed", "weight gradients apart", "in flight", "bubble", "activations", "holds")
    return grid("pipeline", head, rows, caption)


def sweep(result: Result) -> Table:
    """A row a combination, the best one bold and with a star."""
    keys = result["keys"]
    head = (
        "",
        *keys,
        "ranks",
        "layout",
        "step time",
        "tokens/s",
        "a rank",
        "imbalance",
        "bubble",
        "exposed",
        "holds",
        "gain over",
        "planning",
    )
    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    for place, row in enumerate(result["rows"]):
        settings = [written(row["settings"][key]) for key in keys]
        if "error" in row:
            rows.append(("", *settings, "", "impossible", *[""] * 9))
            reasons.append(f"{said(row['settings'])}: {row['error']['what']} ({row['error']['found']})")
            continue
        layout, baseline = row["layout"], row["strongest_baseline"]
        cells = [
            "*" if place == result["best"] else "",
            *settings,
            str(row["world_size"]),
            " ".join(f"{name}{degree}" for name, degree in layout.items() if degree > 1) or "dp1",
            seconds(row["step_s"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s_per_rank']:,.1f}",
            f"{row['imbalance']:.3f}",
            percent(row["bubble_frac"]),
            percent(row["exposed_frac"]),
            gib(row["peak_bytes"]) + ("" if row["fits"] else ": too much"),
            f"{baseline['name']} {baseline['gain']:.2f}x",
            seconds(row["plan_s"]),
        ]
        rows.append(tuple(cells))
    marked = "*: most tokens/s a rank among those that fit" if result["best"] is not None else "none fits into memory"
    about = f"predicted, means of {result['steps']} step(s); {marked}; gain: over the fastest baseline of the row"
    return grid("what if", head, rows, "\n".join([about, *reasons]), bold=result["best"])


def _planners(steps: list[Result]) -> Table:
    """evenload beside the baselines that planned every step: sums of seconds, means of the rest."""
    named: dict[str, list[Result]] = {"evenload": steps}
    for name in steps[0]["baselines"]:
        if all(name in s["baselines"] for s in steps):
            named[name] = [s["baselines"][name] for s in steps]
    ours_s = sum(s["step_s"] for s in steps)
    rows, over = [], []
    for name, row in named.items():
        total_s = sum(s["step_s"] for s in row)
        kinds = {k: sum(s["micro_batch_imbalance"][k] for s in row) / len(row) for k in ("forward", "backward")}
        ignored = next((s["ignores"] for s in row if s.get("ignores")), None)
        rows.append(
            (
                ("stock (padded)" if name == "padded" else name) + (": not allowed" if ignored else ""),
                seconds(total_s),
                f"{total_s / ours_s:.2f}x",
                sum(s["imbalance"] for s in row) / len(row),
                percent(sum(s["bubble_frac"] for s in row) / len(row)),
                _directions(kinds),
                gib(max(s["peak_bytes"] for s in row)),
            )
        )
        broken = next((s["over_caps"] for s in row if s.get("over_caps")), None)
        if ignored:
            over.append(f"{name} is not allowed: {ignored}")
        elif broken and total_s < ours_s:
            over.append(f"{name} is faster, but may not be run: {broken}")
    head = ("", "all steps", "against evenload", "imbalance", "bubble", "micro-batches F, B", "holds")
    return grid("planners", head, rows, "\n".join(["predicted", *over]))


def _directions(imbalance: dict[str, float]) -> str:
    return f"{imbalance['forward']:.3f}, {imbalance['backward']:.3f}"


def profile(result: Result) -> Group:
    """Coefficients of the passes, then the links."""
    rows = [
        (name, f"{c['launch_s']:.3g}", f"{c['token_s']:.3g}", f"{c['pair_s']:.3g}", percent(result["fit_error"][name]))
        for name, c in result["passes"].items()
    ]
    head = ("", "s a launch", "s a token", "s a (query, key) pair", "error of the fit")
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


def doctor(result: Result) -> Table:
    rows = [(r["name"], r["found"] or "not installed", r["supports"], r["status"]) for r in result["hosts"]]
    rows += [(f"{kind}: {r['name']}", "", "", r["status"]) for kind in ("attention", "solver") for r in result[kind]]
    groups = Counter((r["name"].partition(".")[0], r["supports"], r["status"]) for r in result["patches"])
    rows += [
        (f"patches: {name}", f"{count} rows", supports, status) for (name, supports, status), count in groups.items()
    ]
    return grid("doctor", ("", "found", "supported", "status"), rows)


def plugins(result: Result) -> Table:
    rows = [(p["name"], p["summary"], "; ".join(p["papers"]), p["origin"]) for p in result["plugins"]]
    return grid("plugins", ("name", "what it does", "papers", "from"), rows)


def _machine(result: Result) -> str:
    host = result["host"]
    return ", ".join(str(host[key]) for key in ("trainer", "layout", "dtype", "attention", "device") if key in host)
