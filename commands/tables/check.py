"""What `check` says of a step."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.input.format import seconds
from .show import MOST_FAULTS, Result, grid, plain


def table(result: Result) -> Group:
    """A row a plugin, what the step holds, and the verdict."""
    refused = [f"{one['what']} ({one['found']})" for one in result["refusals"]]
    rows = [(row["name"], *_standing(row, refused)) for row in result["plugins"]]
    shown = _checked_step(result["step"], "costs={costs}, cluster={cluster}".format(**result)) if result["step"] else []
    verdict = plain(f"{result['verdict']}: {result['says']}", "bold")
    return Group(grid("check", ("plugin", "", "speedup"), rows), *shown, verdict)


def _standing(row: Result, refusals: list[str]) -> tuple[str, str]:
    if row["on"]:
        return "on", f"{row['gain']:.2f}x"
    why = [row["refused"]] if row["refused"] else refusals
    return (f"refused: {'; '.join(why)}" if why else "nothing planned"), ""


def _checked_step(step: Result, setting: str) -> list[Table | Text]:
    rows = [
        ("samples, tokens", f"{step['samples']:,}, {step['tokens']:,}"),
        ("shortest, longest sample", f"{min(step['lengths']):,}, {max(step['lengths']):,} tokens"),
        ("padded tokens, before and after", f"{step['stock_padded_tokens']:,}, {step['padded_tokens']:,}"),
        ("step, before and after, predicted", f"{seconds(step['stock_step_s'])}, {seconds(step['step_s'])}"),
        ("speedup, predicted", f"{step['gain']:.2f}x"),
    ]
    remarks = [
        f"all times are predicted for {setting}: set them to your hardware's",
        "speedup: predicted from the lengths of this step; of a plugin: over the step with the plugins before it alone",
        "before: rows as the script packs them, without padding"
        if step["packed"]
        else "before: micro-batches of the loop's own size, each padded to its longest sample",
        *step["notes"][:MOST_FAULTS],
    ]
    step_shown = grid(f"first step, {step['loop']}, {step['ranks']} data-parallel ranks", ("", ""), rows)
    return [step_shown, plain("\n".join(remarks), "table.caption")]
