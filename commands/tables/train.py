"""What a run of `train` came to: variants, bubbles, validations, the summary, and what it showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.input.format import clock, percent, seconds
from ...training.sampling.figures import score_of
from .scorers import lines_of
from .show import Columns, Result, by_columns, column, grid, machine, of_plugins, plain
from .sparse import said_of, word_of

_VARIANT: Columns = {
    "": column("name"),
    "tokens/s": column("tokens_per_s"),
    "imbalance": column("imbalance"),
    "padding": column("padding_frac", percent),
    "idle": column("bubble_frac", percent),
    "worst rank": column("bubble_worst", percent),
    "step": column("step_s", seconds),
    "predicted": column("predicted_s", seconds),
    "last loss": column("loss"),
}
SPEEDUP = "speedup: evenload's over the row, by total seconds of the same steps"
"""What tables say of that column; docs/measuring.md has the definition."""
_MOST_ROWS = 32
"""Of a table with a row a rank."""
_MOST_VALIDATIONS = 12
"""Shown of a run: the first, the lowest, and the last ones; --json has all."""


def table(result: Result) -> Group:
    """A row a variant, a row a rank of each recorded one, what the run came to; with baselines, what it showed. Of
    what a plugin trained in place of the model, the plugin's tables."""
    if own := of_plugins("train", result):
        return Group(*own)
    bubbles = [_bubbles(name, rows) for name, rows in result["bubbles"].items()]
    shown = closing(result["comparison"], result["host"])
    held_out = [*_domains(result["steps"], result["validation"]), *_validations(result["validation"])]
    variants = [_variants(result)] if result["summary"]["steps"] else []
    return Group(*variants, *bubbles, *held_out, _summary(result["summary"]), *shown)


def _variants(result: Result) -> Table:
    speedups = {name: one["of_totals"] for name, one in result["comparison"].items() if one["of_totals"]}
    columns = dict(_VARIANT)
    if speedups:
        columns["speedup"] = lambda row: f"{speedups[row['name']]:.2f}x" if row["name"] in speedups else ""
    caption = (
        f"imbalance: busiest rank over mean, measured; planning took {percent(result['plan_share'])} of the step\n"
        "idle: share of the step outside forward and backward, mean and worst rank; predicted: the simulator's step"
    )
    if speedups:
        caption += f"\n{SPEEDUP}"
    if any(not 0.5 < row["step_s"] / (row["predicted_s"] or row["step_s"]) < 2 for row in result["variants"].values()):
        caption += "\npredicted is far off: `evenload profile RECIPE --out costs.yaml` fits it, then costs=costs.yaml"
    if result["trace"]:
        caption += f"\n{result['trace']} shows measured and predicted steps: open it in ui.perfetto.dev"
    if result["delay_steps"] or result["waiting"]:
        caption += f"\ntokens were trained {result['delay_steps']:.2g} steps late on average"
        caption += f"; {result['waiting']} samples still wait"
    if result["pictures"]:
        caption += f"\n{' and '.join(result['pictures'].values())} show the measured steps, rank by rank"
    rows = [{"name": name, **variant} for name, variant in result["variants"].items()]
    return by_columns(f"training on {machine(result)}", columns, rows, caption, spare=("worst rank", "padding"))


_BUBBLE: Columns = {
    "": lambda row: f"stage {row['stage']}, rank {row['rank']}",
    "bubble": column("bubble_frac", percent),
    "predicted": column("predicted_bubble_frac", percent),
    "before its first pass": column("before_frac", percent),
    "between passes": column("between_frac", percent),
    "after its last pass": column("after_frac", percent),
}


def _bubbles(name: str, rows: list[Result]) -> Table:
    """What each rank of each stage waits, in the order of ranks; of many the ones that wait most."""
    shown = sorted(rows, key=lambda row: -row["bubble_frac"])[:_MOST_ROWS]
    shown.sort(key=lambda row: (row["stage"], row["rank"]))
    caption = "shares of the traced steps in which a rank waits for other ranks and stages, measured"
    if len(rows) > len(shown):
        caption += f"\n{len(shown)} of {len(rows)} that wait most; all are in --json and in the trace's otherData"
    return by_columns(f"bubbles of {name}", _BUBBLE, shown, caption)


def _domains(steps: Sequence[Result], validations: Sequence[Result]) -> list[Table]:
    """What was drawn of each domain and what it came to; none without domains."""
    held_out = (validations[-1]["domains"] or {}) if validations else {}
    sparse = word_of(validations[-1].get("sparse")) if validations else ""
    trained: dict[str, list[Result]] = {}
    for step in steps:
        for name, own in (step["domains"] or {}).items():
            trained.setdefault(name, []).append(own)
    total = sum(own["targets"] for rows in trained.values() for own in rows)
    cells = []
    for name in sorted({*trained, *held_out}):
        rows = trained.get(name, [])
        samples, targets = (sum(own[key] for own in rows) for key in ("samples", "targets"))
        losses = [f"{own['loss']:.4f}" for own in (*rows[:1], *rows[-1:])] or ["", ""]
        scored = f"{held_out[name]['loss']:.4f}" if name in held_out else ""
        cells.append([name, f"{samples:,}", percent(targets / total) if total else "", losses[0], losses[-1], scored])
    head = ("domain", "samples", "of targets", "first loss", "last loss", f"validation{sparse}")
    return (
        [grid("domains", head, cells, "losses of the first and the last step that drew of the domain")] if cells else []
    )


def _validations(rows: Sequence[dict[str, Any]]) -> list[Table]:
    if not rows:
        return []
    lowest = max((i for i, row in enumerate(rows) if row["best"]), default=0)
    shown = sorted({0, lowest, *range(max(0, len(rows) - _MOST_VALIDATIONS + 2), len(rows))})
    sampled: dict[str, float] = next((row["generate"] for row in rows if row.get("generate")), {})
    names = [name for name in sampled if name == "score" or "_at_" in name]
    head = ("steps before", "loss", "perplexity", "tokens/s", "took", *(name.replace("_at_", "@") for name in names))
    cells = [[*_validation(rows[i]), *_sampled(rows[i].get("generate"), names)] for i in shown]
    last = rows[-1]
    caption = f"{last['sequences']:,} sequences, {last['targets']:,} targets each time"
    if last["without_target"]:
        caption += f"; {last['without_target']:,} samples without a target are left out"
    if sampled:
        caption += _cost_of_samples([row["generate"] for row in rows if row["generate"]])
    if len(shown) < len(rows):
        caption += f"\n{len(shown)} of {len(rows)} validations; --json has all"
    caption += said_of(last.get("sparse"))
    return [grid("validation", head, cells, caption, bold=shown.index(lowest))]


def _validation(row: dict[str, Any]) -> list[Any]:
    rate, loss = row["tokens"] / row["validation_s"], f"{row['loss']:.4f}{word_of(row.get('sparse'))}"
    return [row["step"], loss, row["perplexity"], rate, seconds(row["validation_s"])]


def _sampled(row: Mapping[str, float] | None, names: Sequence[str]) -> list[str]:
    return [(score_of(row) if name == "score" else f"{row[name]:.3f}") if row else "" for name in names]


def _cost_of_samples(rows: Sequence[dict[str, float]]) -> str:
    took_s, last = sum(row["generate_s"] + row["score_s"] for row in rows), rows[-1]
    rate = sum(row["tokens"] for row in rows) / (sum(row["generate_s"] for row in rows) or 1.0)
    return (
        f"\nsamples of prompts took another {seconds(took_s)} ({rate:,.0f} tokens/s); "
        f"{percent(last['cut_frac'])} of the last ended by their limit"
        + "".join(f"\n{name}: {said}" for name, said in lines_of(last))
    )


def _summary(summary: dict[str, Any]) -> Table:
    """The table of `metrics.totals`; without rates for a run that was done already."""
    rows: list[tuple[str, Any]]
    best = summary["best_checkpoint"]
    of_best = [
        ("checkpoint of the best validation", best),
        ("  as a model", f"evenload export {best} --out DIR"),
    ]
    if not summary["steps"]:
        said = "no step was left to train: raise train.steps to train on"
        rows = [("steps", "0"), ("last checkpoint", summary["checkpoint"] or "none"), *(of_best if best else ())]
        return grid("summary", ("", ""), rows, said)
    rows = [
        ("steps", f"{summary['steps']:,}"),
        ("tokens, of them targets", f"{summary['tokens']:,}, {summary['targets']:,}"),
        ("time in steps", clock(summary["train_s"])),
        ("tokens/s", summary["tokens_per_s"]),
        ("MFU at the cluster's rate", percent(summary["mfu"])),
        ("last checkpoint", summary["checkpoint"] or "none: checkpoint.dir is null"),
        *(of_best if best else ()),
    ]
    losses = f"{summary['loss']:.4f}, {summary['best_loss']:.4f} in step {summary['best_step']}"
    rows.insert(5, ("loss of the last step, and lowest", losses))
    return grid("summary", ("", ""), rows)


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
        shown = f"speedup in {steps} alternating steps (totals, 95 % interval): {verdicts}"
    return [plain(f"Shown: {shown}{alike}. Not shown: {missing}.", "bold")]


def _verdict(name: str, compared: Result) -> str:
    """evenload's speedup over one baseline; a difference within the noise is none."""
    if compared["same_plans"]:
        return f"none over {name}, whose plan evenload runs in every step"
    low, high = compared["interval"]
    if low <= 1 <= high:
        return f"none over {name} within the noise ({low:.2f}x to {high:.2f}x)"
    return f"{compared['of_totals']:.2f}x over {name} ({low:.2f}x to {high:.2f}x)"
