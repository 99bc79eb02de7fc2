"""A drill: jobs that fail on purpose, in every phase, and what they leave. Measured.

    python benchmarks/faults/faults.py [--quick | --restarts] [--only TEXT] [--json] [--out FILE]

Two ranks train six steps of a tiny model, with a checkpoint every other step. In the fourth step, or while they start
or resume, one rank is killed, stopped, raises, hangs, is slow, gets a value that is no number, or finds its disk full
(`drill/cases.py`; the faults are planted from outside, `drill/plant.py`). Then the same command resumes, and the
samples of all steps are compared with those of a run that nothing disturbed.

seconds        from the fault to the end of the launcher, which is the last to end. safety.gone_s is 4 here and
               safety.stuck_s 40, so that a frozen rank 0 takes 4 s and a few, and a hang 40 s and a few
said           the message; there must be one, with the right rank and the very phase
left           processes that were still there 2 s later
good           the last good checkpoint afterwards
lost, twice    samples, over all six steps

--only runs the cases whose name has the text in it, such as "mesh, ring" or "stop rank 0".

With --restarts the job runs under ``torchrun --max-restarts 2`` instead, with one agent and with two, rank 1 is killed
once, at ten moments, and nobody starts anything again (`drill/restarts.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evenload.commands.tables.show import emit, grid
from rich.console import Group

sys.path.append(str(Path(__file__).with_name("drill")))
import restarts
from cases import SETTINGS, Case, cases_of, quick_cases
from plant import COLLECTIVES
from runs import Drill

MOST_ROWS = 40


def table(data: dict[str, Any]) -> Any:
    """All cases where these are few, else what they come to and those that are not as they should be."""
    if len(data["cases"]) <= MOST_ROWS:
        return details(data, data["cases"])
    wrong = [row for row in data["cases"] if row["faults"]]
    return Group(summary(data["cases"]), details(data, wrong))


def summary(rows: list[dict[str, Any]]) -> Any:
    """Longest seconds by phase and fault over all settings, and how many cases that are."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault(row["phase"], {}).setdefault(row["fault"], []).append(row["seconds"] or 0.0)
    columns = sorted({fault for cell in cells.values() for fault in cell}, key=lambda fault: fault.split()[::-1])
    lines = [
        [phase, *(f"{max(cell[c]):.1f} ({len(cell[c])})" if c in cell else "" for c in columns)]
        for phase, cell in cells.items()
    ]
    return grid("longest seconds (cases)", ["phase", *columns], lines)


def details(data: dict[str, Any], shown: list[dict[str, Any]]) -> Any:
    head = ["case", "seconds", "said", "left", "good", "lost", "twice", "not as it should be"]
    rows = [
        [
            row["case"],
            row["seconds"],
            "; ".join(message.splitlines()[0].removeprefix("evenload: ") for message in row["messages"]) or "-",
            len(row["orphans"]),
            (row["last_good"] or "-").removeprefix("step0000000"),
            row["lost"],
            row["repeated"],
            ", ".join(row["faults"]) or "-",
        ]
        for row in shown
    ]
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    return grid("faults", head, rows, f"{len(data['cases'])} cases, {wrong} not as they should be; {data['disk']}")


def restarts_table(data: dict[str, Any]) -> Any:
    head = ["case", "exit codes", "resumed at step", "lost", "twice", "losses apart", "not as it should be"]
    rows = [
        [
            row["case"],
            " ".join(map(str, row["codes"])),
            " ".join(map(str, dict.fromkeys(row["resumed_at"]))) or "-",
            row["lost"],
            row["repeated"],
            row["loss_apart"],
            ", ".join(row["faults"]) or "-",
        ]
        for row in data["cases"]
    ]
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    return grid("torchrun --max-restarts 2", head, rows, f"{len(rows)} cases, {wrong} not as they should be")


def restarted(only: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of --restarts."""
    reference = None
    for num_agents in (1, 2):
        for moment in restarts.MOMENTS:
            if only in f"{moment}, {num_agents} agents":
                reference = reference or restarts.undisturbed(folder)
                yield restarts.run(moment, num_agents, folder, reference)


def all_cases(drill: Drill, only: str) -> Iterator[Case]:
    """Of every setting; which collectives it has takes a run to know, so that is asked only where they are wanted."""
    for setting in SETTINGS:
        possible = [case for case in cases_of(setting, COLLECTIVES) if only in case.name]
        collective = any(case.phase.where in COLLECTIVES and case.phase.name != "hand-over" for case in possible)
        yield from cases_of(setting, drill.collectives(setting) if collective else ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a case for each way of waiting, and one of numbers")
    parser.add_argument("--restarts", action="store_true", help="under torchrun, which starts the ranks anew")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.restarts:
        with tempfile.TemporaryDirectory(prefix="evenload-drill-") as folder:
            data = {"cases": list(restarted(options.only, Path(folder)))}
        finish(data, options, restarts_table)
        return
    with tempfile.TemporaryDirectory(prefix="evenload-drill-") as folder:
        drill = Drill(Path(folder))
        try:
            rows = []
            for case in quick_cases() if options.quick else all_cases(drill, options.only):
                if options.only in case.name:
                    rows.append(drill.run(case))
                    print(f"{rows[-1]['seconds']} s  {case.name}: {rows[-1]['faults'] or 'fine'}", file=sys.stderr)
        finally:
            drill.close()
    disk = "a full disk is a small tmpfs" if drill.has_disk else "a full disk is a limit of file sizes"
    finish({"cases": rows, "disk": disk}, options, table)


def finish(data: dict[str, Any], options: argparse.Namespace, drawn: Callable[[dict[str, Any]], Any]) -> None:
    """Write and print."""
    if options.out:
        options.out.write_text(json.dumps(data, indent=1))
    emit(data, options.json, drawn)


if __name__ == "__main__":
    main()
