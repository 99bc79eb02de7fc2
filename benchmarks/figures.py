"""The figures of the README, each by its command: what is measured now next to what the README says.

    make figures                       # the rows, and about how many minutes each takes on two cores; runs nothing
    make figures ROWS=pairs,verify     # these rows; ROWS=all: every one
    python benchmarks/figures.py --rows pairs,verify [--runs 2] [--json] [--out FILE]

A row is a command of README's evidence. It runs as it stands there, with --json; `--runs 2` repeats it, to see whether
a figure lies within its interval of the other run. The intervals are those of each command: 95 % of alternating steps
for `evenload bench`, the lowest and the highest run for benchmarks of scripts. --out also writes the table as Markdown
next to the JSON, with the date, the machine and the versions. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from evenload.benchmarks.frame import ROOT, Row, columns, machine, main, options

Result = dict[str, Any]


class Figure(NamedTuple):
    """A number of a run, with the lowest and the highest that it may be."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


class Evidence(NamedTuple):
    """A row: the command as the README has it, its minutes, and the figures in what it prints."""

    command: str
    minutes: int
    figures: Callable[[Result], Iterator[Figure]]


def of_pairs(result: Result) -> Iterator[Figure]:
    rows = {row["variant"]: row for row in result["rows"]}
    ours, bfd = rows["evenload"], rows["bfd"]
    yield Figure("over padding", ours["over_padded"], *ours["ratios"])
    yield Figure("bfd over padding", bfd["over_padded"], *bfd["ratios"])
    yield Figure("over bfd", ours["over_padded"] / bfd["over_padded"])


def of_trees(result: Result) -> Iterator[Figure]:
    rows = {row["variant"]: row for row in result["rows"]}
    trees = rows["trees"]
    yield Figure("over padding", trees["over_padded"], *trees["ratios"])
    yield Figure("over no trees", trees["over_padded"] / rows["rows"]["over_padded"])


def of_programs(result: Result) -> Iterator[Figure]:
    for row in result["rows"]:
        yield Figure(row["program"], row["faster"], row["ratios"][0], row["ratios"][-1])


def of_bench(result: Result) -> Iterator[Figure]:
    for name, ratio in result["ratio"].items():
        yield Figure(f"over {name}", ratio["of_totals"], *(ratio["interval"] or ()))


def of_verify(result: Result) -> Iterator[Figure]:
    yield Figure("gradients, relative error", result["grad_rel_err"])


def of_predicted(result: Result) -> Iterator[Figure]:
    error = result["error"]["all"]
    yield Figure("error, mean", error["mean"])
    yield Figure("error, worst", error["worst"])


EVIDENCE = {
    "pairs": Evidence("python benchmarks/hosts/pairs.py --repeats 3", 15, of_pairs),
    "quick": Evidence("python benchmarks/hosts/pairs.py --quick", 8, of_pairs),
    "trees": Evidence("python benchmarks/hosts/trees.py", 10, of_trees),
    "programs": Evidence("python benchmarks/hosts/programs.py --tunings lora", 15, of_programs),
    "finetune": Evidence("evenload bench finetune --against stock,best_fit", 5, of_bench),
    "pipeline": Evidence("evenload bench recipes/pipeline.yaml --against stock,in_order", 5, of_bench),
    "slices": Evidence("evenload bench recipes/slices.yaml --against whole,in_order", 5, of_bench),
    "verify": Evidence("evenload verify recipes/quickstart.yaml train.dtype=fp64", 2, of_verify),
    "predicted": Evidence("python benchmarks/costs/predicted.py", 60, of_predicted),
}


def printed(command: str) -> Result:
    """What a command prints with --json. Raises SystemExit with the end of its messages where it fails."""
    first, *words = shlex.split(command)
    start = [sys.executable] if first == "python" else [sys.executable, "-m", first]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([*start, *words, "--json"], cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout)
    return result


def measured(names: list[str], runs: int) -> Iterator[Row]:
    """A row a figure of these rows, with the value and the interval of each run."""
    for name in names:
        evidence = EVIDENCE[name]
        began_s = time.monotonic()
        results = [list(evidence.figures(printed(evidence.command))) for _ in range(runs)]
        minutes = (time.monotonic() - began_s) / 60 / runs
        print(f"{name}: {minutes:.1f} minutes a run", file=sys.stderr)
        for same in zip(*results, strict=True):
            own = [figure._asdict() for figure in same]
            yield {"row": name, "command": evidence.command, "figure": same[0].name, "minutes": minutes, "runs": own}


def versions() -> str:
    """What is installed of the packages that are measured."""
    rows = []
    for package in ("torch", "megatron-core", "deepspeed", "transformers", "trl"):
        try:
            rows.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(rows)


def benchmark(asked: argparse.Namespace) -> Result:
    names = list(EVIDENCE) if asked.rows == ["all"] else asked.rows
    if unknown := [name for name in names if name not in EVIDENCE]:
        raise SystemExit(f"no rows {', '.join(unknown)}; there are {', '.join(EVIDENCE)}")
    about = {"date": str(datetime.date.today()), "machine": machine(), "versions": versions()}
    result = {**about, "rows": list(measured(names, asked.runs))}
    if asked.out:
        asked.out.with_suffix(".md").write_text(page(result))
    return result


def shown(run: Row) -> str:
    """A value with its interval; errors as powers of ten."""
    value, low, high = (run[key] for key in ("value", "low", "high"))
    text = f"{value:.3g}" if value < 1e-3 else f"{value:.3f}"
    return text if low is None else f"{text} ({low:.2f} to {high:.2f})"


def page(result: Result) -> str:
    """The table as Markdown."""
    runs = [f"run {number + 1}" for number in range(max((len(row["runs"]) for row in result["rows"]), default=0))]
    lines = [f"{result['date']}, {result['machine']}, {result['versions']}", ""]
    heads = ["command", "figure", *runs, "minutes a run"]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in result["rows"]:
        cells = [f"`{row['command']}`", row["figure"], *map(shown, row["runs"]), f"{row['minutes']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(result: Result) -> Any:
    if not result["rows"]:
        rows = [{"name": name, **evidence._asdict()} for name, evidence in EVIDENCE.items()]
        cells: dict[str, Any] = {"row": "{name}", "minutes, about": "{minutes}", "command": "{command}"}
        total = sum(evidence.minutes for evidence in EVIDENCE.values())
        return columns("figures of the README", rows, cells, f"all: {total} minutes; make figures ROWS=pairs,verify")
    cells = {
        "row": "{row}",
        "figure": "{figure}",
        "measured": lambda row: "; ".join(map(shown, row["runs"])),
        "minutes": "{minutes:.1f}",
    }
    about = "{date}, {machine}, {versions}".format(**result)
    return columns("figures of the README, measured", result["rows"], cells, about)


if __name__ == "__main__":
    main(options(__doc__, rows=[], runs=1), benchmark, table)
