"""What `audit` says of a script's own step."""

from __future__ import annotations

from rich.console import Group

from ...commands.tables.show import MOST_FAULTS, Result, grid, plain
from ...core.input.format import percent


def table(result: Result) -> Group:
    """What the step holds, what is wrong with it, and the verdict."""
    verdict = plain(f"{result['verdict']}: {result['says']}", "bold")
    step = result["step"]
    if step is None:
        return Group(verdict)
    rows = [
        ("micro-batches of each rank", ", ".join(map(str, step["micro_batches"]))),
        ("samples, targets", f"{step['samples']:,}, {step['targets']:,}"),
        ("padding", percent(step["padding_frac"])),
        ("busiest rank over the mean, predicted", f"{step['busiest_over_mean']:.2f}"),
        ("loss of the step, and of each sample alone", f"{_loss(step['loss'])}, {_loss(step['loss_alone'])}"),
        ("attention and positions", _standing(step, "states")),
        ("targets", _standing(step, "targets")),
        ("divisor", _standing(step, "divisor")),
    ]
    rows += [("beware", remark) for remark in step["remarks"]]
    if step["not_judged"]:
        rows.append(("batches left out", f"a sample alone cannot be given: {', '.join(step['not_judged'])}"))
    wrongs = [(place(one), one["what"], one["found"]) for one in step["wrong"][:MOST_FAULTS]]
    more = step["num_wrong"] - len(wrongs)
    caption = f"and {more} more, of which --json has the first 200 of each rank" if more > 0 else ""
    shown = [grid("wrong", ("token", "what", "found"), wrongs, caption)] if wrongs else []
    return Group(grid("the first step as the script makes it", ("", ""), rows), *shown, verdict)


def place(wrong: Result) -> str:
    """``token 0 of sample 1 of micro-batch 0 on rank 0 (row 0, slots 7 to 18)``."""
    slots = f"row {wrong['row']}, slots {wrong['start']} to {wrong['stop'] - 1}"
    where = f"sample {wrong['sample']} of micro-batch {wrong['micro_batch']} on rank {wrong['rank']}"
    return f"token {wrong['token']} of {where} ({slots})"


def _standing(step: Result, what: str) -> str:
    return "judged" if step["judged"][what] else "not judged: the loss is another than cross-entropy of the next token"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
