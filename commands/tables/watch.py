"""The last steps of a run that goes on: a table, and each step as a bar of what its ranks did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...core.input.format import clock, percent, seconds
from ...training.sampling.figures import figures_of
from .show import Columns, Result, by_columns, column, plain
from .sparse import word_of

_SHOWN = 10
_WIDTH = 56
"""Characters of the longest bar, and of a curve."""
_QUIET_S = 5.0
"""Without a step for so long, that is said."""
_LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_BUSY, _IDLE, _PLAN, _PREDICTED = "\u2588", "\u2591", "\u00b7", "\u2502"


def _figure(key: str, show: Callable[[float], str]) -> Callable[[Result], str | None]:
    """A cell of what not every log says."""
    return lambda row: None if row.get(key) is None else show(row[key])


_STEP: Columns = {
    "step": column("step", str),
    "loss": lambda row: row.get("loss"),
    "tokens/s": lambda row: row["tokens"] / row["step_s"],
    "step time": column("step_s", seconds),
    "predicted": lambda row: seconds(row["predicted_s"]) if row.get("predicted_s") else None,
    "imbalance": _figure("imbalance", "{:.3f}".format),
    "padding": _figure("padding_frac", percent),
    "idle": _figure("bubble_frac", percent),
    "planning": _figure("plan_s", seconds),
}


@contextmanager
def shown_live() -> Iterator[Callable[[Result], object]]:
    """Shows a result in the place of the one before; nothing where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        yield lambda result: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda result: live.update(table(result), refresh=True)


def table(result: Result) -> Group:
    """The last steps, what is known of all, and their pictures."""
    rows = result["last"][-_SHOWN:]
    if not rows:
        return Group(plain(f"{result['log']}: no step yet"))
    of = f" of {result['of_steps']:,}" if result["of_steps"] else ""
    title = f"{result['log']}: step {rows[-1]['step'] + 1:,}{of}, {_stands(result)}"
    about = [f"{result['tokens']:,} tokens; means of {len(result['last']):,} steps: {_means(result)}"]
    if best := result["validation"]:
        scores = {name: score for name, score in (best.get("generate") or {}).items() if isinstance(score, float)}
        sampled = f", {figures_of(scores)}" if scores else ""
        loss = "no number" if best.get("loss") is None else f"{best['loss']:.4f}"
        about.append(f"validation after {best['step']} steps: loss {loss}{word_of(best.get('sparse'))}{sampled}")
    if tenants := result["tenants"]:
        about.append("losses: " + ", ".join(f"{name} {loss:.4f}" for name, loss in tenants.items()))
    columns = {name: cell for name, cell in _STEP.items() if any(cell(row) is not None for row in rows)}
    spare = ("planning", "padding", "predicted")
    return Group(
        by_columns(title, columns, rows, "\n".join(about), spare=spare), *_picture(rows), *_curve(result["last"])
    )


def _stands(result: Result) -> str:
    if result["ends"]:
        return f"ended: {result['ends']}"
    last, quiet_s = result["last"][-1], result["quiet_s"]
    if quiet_s > max(_QUIET_S, 3 * last["step_s"]):
        return f"nothing new for {clock(quiet_s)}"
    left = (result["of_steps"] or 0) - last["step"] - 1
    return f"about {clock(left * result['means']['step_s'])} left" if left > 0 else "goes on"


def _means(result: Result) -> str:
    means = result["means"]
    said = f"{result['tokens_per_s']:,.0f} tokens/s, step {seconds(means['step_s'])}"
    if means["predicted_s"]:
        said += f" (predicted {seconds(means['predicted_s'])})"
    said += f", imbalance {means['imbalance']:.3f}" if means["imbalance"] is not None else ""
    return said + (f", idle {percent(means['bubble_frac'])}" if means["bubble_frac"] is not None else "")


def _picture(rows: Sequence[Result]) -> list[Text]:
    """A line a step, as long as the step took: passes, idle, waiting for the plan, and its predicted end."""
    longest_s = max(max(row["step_s"], row.get("predicted_s") or 0.0) for row in rows)
    lines = [f"{_BUSY} passes  {_IDLE} idle  {_PLAN} waiting for the plan  {_PREDICTED} predicted end; mean of ranks"]
    for row in rows:
        length, total = _WIDTH * row["step_s"] / longest_s, row["step_s"]
        bubble = row.get("bubble_frac") or 0.0
        waits = min(bubble, (row.get("plan_wait_s") or 0.0) / total)
        plan, idle = round(length * waits), round(length * (bubble - waits))
        bar = list((_BUSY * (round(length) - plan - idle) + _IDLE * idle + _PLAN * plan).ljust(_WIDTH + 1))
        if row.get("predicted_s"):
            bar[round(_WIDTH * row["predicted_s"] / longest_s)] = _PREDICTED
        lines.append(f"{row['step']:>6} {''.join(bar).rstrip()}")
    return [plain(line) for line in lines]


def _curve(rows: Sequence[Result]) -> list[Text]:
    """The losses of the steps that are held, as a line of blocks."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None and math.isfinite(row["loss"])]
    if len(losses) < 2:
        return []
    picked = [losses[place * len(losses) // _WIDTH] for place in range(_WIDTH)] if len(losses) > _WIDTH else losses
    low, high = min(picked), max(picked)
    steps = (len(_LEVELS) - 1) / ((high - low) or 1.0)
    blocks = "".join(_LEVELS[round((loss - low) * steps)] for loss in picked)
    return [plain(f"  loss {blocks} {low:.4f} to {high:.4f}")]
