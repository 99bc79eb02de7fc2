"""Upstream's own scripts, unmodified, on two CPU ranks: do they run with evenload, are they equal, what is gained.

    python benchmarks/hosts/upstream.py CHECKOUT... [--only NAME] [--layouts ddp,zero2] [--repeats 1] [--float64]
        [--keep FOLDER] [--json] [--out FILE]

A CHECKOUT is a folder called transformers, trl, accelerate, peft or DeepSpeedExamples that has upstream's files at
upstream's paths (`cases.py`), or one of Megatron-LM, known by its files (`megatron_cases.py`); rows of those that are
missing say so. Each script runs stock and by ``evenload run``, alternating, on tiny models and ragged text that are
made on the spot (tests/hosts/assets.py); nothing is downloaded. Megatron-LM's stock runs have evenload's CPU bridge.

    equal     the largest relative difference of losses, of gradient norms and of evaluations over all steps, of what
              Trainer logs (unrounded), else of what the script prints
    gradients with --float64: ||evenload - stock|| / ||stock|| of the first update in float64, the largest over tensors
    tokens    places of input that forward passes in training computed, padding among them, on all ranks
    s a step  the median of the seconds between optimizer steps on rank 0
    said      evenload's last line, or the message with which it refused
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import ROOT, Row, main, options
from evenload.commands.tables.show import grid, stdout_aside
from evenload.core.input.format import seconds

sys.path.append(str(ROOT / "tests" / "hosts"))
import assets
import launching
import megatron_cases
from cases import CASES, Case

RECIPE = "trainer: {}\nplugins:\n  packing: {{enabled: true, max_tokens: {}}}\n"
NAMES = ("loss", "grad_norm", "eval_loss")

NOTHING: Row = {"code": None, "values": {name: {} for name in NAMES}, "tokens": 0, "step_s": [], "said": ""}
"""Of a run that was not asked for."""


def measured(
    case: Case, layout: str, script: Path, data: Path, folder: Path, recipe: Path | None, float64: bool = False
) -> Row:
    """What one run of a script computed, logged and said."""
    variables = {"HOSTS_MEASURED": str(folder), "WANDB_MODE": "disabled"}
    if case.trainer == "megatron":
        folder.mkdir(parents=True)
        variables = launching.megatron_environment(folder, script, float64)
    else:
        prepare(folder, data)
    if case.by_environment is not None:
        variables |= launching.accelerate_environment(layout, folder, **case.by_environment)
    started_by = "forks" if case.trainer == "megatron" else "torchrun"
    run = launching.launch(
        script,
        case.arguments(folder, layout),
        folder,
        recipe,
        **({} if case.ranks == launching.RANKS else {"ranks": case.ranks}),
        **({} if started_by == "torchrun" else {"started_by": started_by}),
        variables=variables,
        limit_s=400,
    )
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]
    log = [row for rank in ranks[:1] for row in rank["log"]]
    values = {name: {row["step"]: row[name] for row in log if name in row} for name in NAMES}
    for name, pattern in case.printed.items():
        values[name] = values[name] or {int(step): float(value) for step, value in pattern.findall(run.output)}
    steps = ranks[0]["steps"] if ranks else []
    gaps = [after - before for before, after in pairwise(steps)]
    tokens = sum(rank["tokens"] for rank in ranks)
    return {"code": run.code, "values": values, "tokens": tokens, "step_s": gaps, "said": said(run.output)}


def prepare(folder: Path, data: Path) -> None:
    """A folder of its own for a run, with the names that scripts look for in it."""
    folder.mkdir(parents=True)
    for name in ("models", "data"):
        (folder / name).symlink_to(data / name)
    (folder / "tatsu-lab").mkdir()
    (folder / "tatsu-lab" / "alpaca").symlink_to(data / "data" / "alpaca")
    (folder / "accuracy").mkdir()
    shutil.copy(Path(__file__).with_name("accuracy.py"), folder / "accuracy")


def said(output: str) -> str:
    """The message of a refusal, else evenload's last line, else the last error, in one line."""
    refusals = re.findall(r"EvenloadError: ((?:.+\n(?:\s*(?:found|do): .+\n)*))", output)
    lines = re.findall(r"^evenload: (.+)$", output, re.MULTILINE)
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .+)$", output, re.MULTILINE)
    return " ".join(((refusals[:1] or lines[-1:] or errors[:1]) or [""])[0].split())


def compared(case: Case, layout: str, script: Path, data: Path, folder: Path, repeats: int, float64: bool) -> Row:
    """The row of a script in a layout."""
    recipes = recipes_of(case, folder)
    runs: dict[str, list[Row]] = {"stock": [], "evenload": []}
    for repeat in range(repeats):
        for name, on in zip(runs, recipes, strict=True):
            if name == "stock" and not case.has_stock:
                runs[name].append(NOTHING)
                continue
            own = free(folder, case, layout, f"{name}-{repeat}")
            runs[name].append(measured(case, layout, script, data, own, on))
    gradients = None
    if float64 and case.exact:
        folders = [free(folder, case, layout, f"{name}-float64") for name in runs]
        for own, on in zip(folders, recipes, strict=True):
            measured(case, layout, script, data, own, on, float64=True)
        gradients = apart(*folders)
    stock, own_run = runs["stock"][0], runs["evenload"][0]
    gaps = {name: [gap for row in rows for gap in row["step_s"]] for name, rows in runs.items()}
    return {
        "script": case.name,
        "arguments": case.note,
        "layout": layout,
        "codes": [stock["code"], own_run["code"]],
        "steps": len(stock["values"]["loss"]),
        "difference": {name: difference(stock["values"][name], own_run["values"][name]) for name in NAMES},
        "gradients": gradients,
        "tokens": [stock["tokens"], own_run["tokens"]],
        "step_s": [statistics.median(gaps[name]) if gaps[name] else None for name in runs],
        "said": [stock["said"], own_run["said"]],
    }


def recipes_of(case: Case, folder: Path) -> tuple[Path | None, Path]:
    """The files of its two recipes; None where the stock run needs none."""
    without, with_plugins = case.recipes
    folder.mkdir(exist_ok=True)
    stock, own = folder / "stock.yaml", folder / "recipe.yaml"
    own.write_text(with_plugins or RECIPE.format(case.trainer, 1024))
    if without is None:
        return None, own
    stock.write_text(without)
    return stock, own


def free(folder: Path, case: Case, layout: str, name: str) -> Path:
    """A folder for a run that is not there yet."""
    own = folder / f"{case.name} {layout} {name}".replace(" ", "_")
    while own.exists():
        own = own.with_name(own.name + "-")
    return own


def apart(stock: Path, own: Path) -> float | None:
    """The largest relative difference of a rank's gradients; None where a run has left none."""
    import torch

    differences = []
    for path in sorted(stock.glob("*.pt")):
        if (own / path.name).exists():
            one, two = torch.load(path), torch.load(own / path.name)
            lengths = {name: float(one[name].norm()) for name in one}
            differences += [float((two[name] - one[name]).norm()) / lengths[name] for name in one if lengths[name] > 0]
    return max(differences, default=None)


def difference(stock: dict[int, float], own: dict[int, float]) -> float | None:
    """The largest relative difference; None where the steps of the runs are not the same, or there are none."""
    return launching.largest_difference(stock, own) if stock and stock.keys() == own.keys() else None


def rows(asked: argparse.Namespace, folder: Path) -> list[Row]:
    """A row for every script and layout that was asked for."""
    checkouts = {name_of(path.resolve()): path.resolve() for path in asked.checkouts}
    data = folder / "assets"
    if set(checkouts) - {"Megatron-LM"}:
        assets.make(data, ("llama",))
    results: list[Row] = []
    for case in (*CASES, *megatron_cases.CASES):
        if asked.only not in f"{case.name} {case.note}":
            continue
        script = checkouts.get(case.checkout, Path("-")) / case.path
        if not script.is_file():
            missing = f"no {case.checkout}/{case.path}"
            results.append({"script": case.name, "arguments": case.note, "path": case.path, "missing": missing})
            continue
        for layout in case.layouts:
            if not asked.layouts or layout in asked.layouts:
                results.append(compared(case, layout, script, data, folder, asked.repeats, asked.float64))
                print(f"{case.name} {case.note} {layout}: {results[-1]['said'][1]}", file=sys.stderr)
    return results


def name_of(checkout: Path) -> str:
    """What upstream calls it; folders of Megatron-LM have many names."""
    return "Megatron-LM" if (checkout / "pretrain_gpt.py").is_file() else checkout.name


def table(result: dict[str, Any]) -> Any:
    """The result for a person; what evenload said stands below, once."""
    head = ("script", "layout", "runs", "steps", "loss", "norm", "evaluation", "gradients", "tokens", "s a step")
    notes: list[str] = []
    body = [cells(row, notes) for row in result["rows"]]
    below = "\n".join(f"{place}: {note}" for place, note in enumerate(notes, 1))
    return grid("Upstream's scripts, stock and with evenload", (*head, "said"), body, below)


def cells(row: Row, notes: list[str]) -> list[Any]:
    """The row as a table shows it; what is new of what was said goes into `notes`."""
    name = f"{row['script']} {row['arguments']}".strip()
    if "missing" in row:
        return [name, *("-" for _ in range(9)), row["missing"]]
    runs = ["-" if code is None else "yes" if code == 0 else f"no ({code})" for code in row["codes"]]
    equal = ["-" if value is None else f"{value:.0e}" for value in (*row["difference"].values(), row["gradients"])]
    tokens = " -> ".join(f"{count:,}" for count in row["tokens"])
    step = " -> ".join("-" if value is None else seconds(value) for value in row["step_s"])
    note = row["said"][1] or row["said"][0]
    if note not in notes:
        notes.append(note)
    return [name, row["layout"], ", ".join(runs), row["steps"], *equal, tokens, step, notes.index(note) + 1]


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="hosts-") as temporary:
        folder = (asked.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return {"rows": rows(asked, folder)}


if __name__ == "__main__":
    own = options(__doc__, only="", layouts=[], float64=False, repeats=1, keep=Path)
    own.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    main(own, benchmark, table)
