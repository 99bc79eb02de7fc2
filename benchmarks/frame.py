"""What all benchmarks share: options, ranks of their own, commands of evenload, clocks, tables and JSON.

A script is its settings, ``benchmark(asked)``, which gives the result, and ``table(result)``, which shows it:

    main(options(__doc__, steps=20, ranks=[64, 1024], lengths=Path, quick=False), benchmark, table)

A script that trains has ``on_rank(asked)`` too, which every rank runs; rank 0 prints the result as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import gib, mib, percent, seconds

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"

UNITS = {"seconds": seconds, "percent": percent, "gib": gib, "mib": mib}
"""Formats of cells besides Python's."""
Row = dict[str, Any]
Cell = str | Callable[[Any], Any]
"""What a column shows of a row: a template, or a function."""


class _Listed(argparse.Action):
    """A list, its values parted by spaces or commas."""

    def __call__(self, parser: Any, asked: Any, values: Any, option_string: str | None = None) -> None:
        setattr(asked, self.dest, [self.const(word) for value in values for word in value.split(",")])


def options(doc: str | None, **own: Any) -> argparse.ArgumentParser:
    """A script's options besides --json and --out, by name and default.

    False is a flag, a list takes several values, a tuple is the choices (the first by default), a type has none by
    default, and ``...`` are words without a name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in own.items():
        flag = f"--{name.replace('_', '-')}"
        if value is ...:
            parser.add_argument(name, nargs="*", metavar="key=value")
        elif value is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(value, type):
            parser.add_argument(flag, type=value)
        elif isinstance(value, tuple):
            parser.add_argument(flag, choices=value, default=value[0])
        elif isinstance(value, list):
            parser.add_argument(flag, action=_Listed, nargs="+", default=value, const=type(value[0]) if value else str)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    return parser


def show(result: Any, asked: argparse.Namespace, table: Callable[[Any], Any]) -> None:
    """Write the result where --out says, and print it or its table."""
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


def main(
    parser: argparse.ArgumentParser,
    benchmark: Callable[[argparse.Namespace], Any],
    table: Callable[[Any], Any],
    on_rank: Callable[[argparse.Namespace], None] | None = None,
) -> None:
    """Run a script: on a rank its work, else the benchmark."""
    asked = parser.parse_args()
    if on_rank and "RANK" in os.environ:
        on_rank(asked)
    else:
        show(benchmark(asked), asked, table)


def begun(script: str, words: Sequence[str], ranks: int) -> subprocess.Popen[str]:
    """The script once more, on so many ranks; its last line on stdout is its result."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command = [*launcher, str(Path(script).resolve()), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result_of(job: subprocess.Popen[str]) -> Row:
    """Of ranks that `begun` has started. Raises RuntimeError where they fail."""
    out, _ = job.communicate()
    if job.returncode:
        raise RuntimeError(f"{' '.join(map(str, job.args))} ended with {job.returncode}")  # type: ignore[arg-type]
    result: Row = json.loads(out.strip().splitlines()[-1])
    return result


def started(script: str, ranks: int) -> Row:
    """What the script's ranks come to, with the words of this command line."""
    return result_of(begun(script, sys.argv[1:], ranks))


def on_job(recipe: str, words: Sequence[str], work: Callable[[Any], Row]) -> None:
    """What ``work`` gives of a trainer on this rank; rank 0 prints it. Collective."""
    from evenload.api import load_recipe
    from evenload.training.job import run_rank

    result = run_rank(load_recipe(recipe, words), work)
    if result is not None:
        print(json.dumps(result))


def described(job: Any) -> Row:
    """The host and the recipe of a job."""
    return {"host": job.host.describe(), "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True)}


def command(*words: object, folder: Path | None = None, **environment: str) -> Row:
    """What a command of evenload says with --json. Raises SystemExit with the end of its messages where it fails."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    line = [sys.executable, "-m", "evenload", *map(str, words), "--json"]
    done = subprocess.run(line, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"evenload {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: Row = json.loads(done.stdout)
    return result


def timed(work: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """What work gives, and the CPU seconds of this process that it takes: the least of ``repeats``."""
    taken_s = []
    for _ in range(repeats):
        begin_s = time.process_time()
        answer = work()
        taken_s.append(time.process_time() - begin_s)
    return answer, min(taken_s)


def machine() -> str:
    """Where a figure is from."""
    python = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {python}"


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every number of rows that are alike."""
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


class _Cells(string.Formatter):
    """``{step_s:seconds}`` besides what Python formats."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return ""
        return UNITS[spec](value) if spec in UNITS else str(super().format_field(value, spec))


def columns(title: str, rows: Iterable[Any], cells: Mapping[str, Cell], caption: str = "") -> Any:
    """A table of rows, by the heads of its columns: a template such as ``{step_s:seconds}``, or a function."""
    templates = _Cells()
    shown = [
        [cell(row) if callable(cell) else templates.format(cell, **row) for cell in cells.values()] for row in rows
    ]
    return grid(title, list(cells), shown, caption)


def interval(over: Mapping[str, Any], digits: int = 2) -> str:
    """The 95 % interval of `training.measuring.compare`; empty where there were too few steps."""
    return " .. ".join(f"{end:.{digits}f}" for end in over["interval"] or ())
