"""A drill: jobs that fail on purpose, in every phase, and what they leave. Measured.

    python benchmarks/faults/faults.py [--quick | --restarts | --replicas] [--only TEXT] [--json] [--out FILE]

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
once, at ten moments, and nobody starts anything again (`drill/restarts.py`). "resized" is a job of ``--nnodes 1:3``
that grows and shrinks.

With --replicas the job has two replicas that come and go (`drill/replicas.py`), and the seconds are from the fault
to the next step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import columns, main, options

sys.path.append(str(Path(__file__).with_name("drill")))
import replicas
import restarts
from cases import SETTINGS, Case, cases_of, quick_cases
from evenload.commands.tables.show import grid
from plant import COLLECTIVES
from rich.console import Group
from runs import Drill

MOST_ROWS = 40


def table(data: dict[str, Any]) -> Any:
    """All cases where these are few, else what they come to and those that are not as they should be."""
    if "restart_s" in data:
        return replicas_table(data)
    if "disk" not in data:
        return restarts_table(data)
    if len(data["cases"]) <= MOST_ROWS:
        return details(data, data["cases"])
    wrong = [row for row in data["cases"] if row["faults"]]
    return Group(summary(data["cases"]), details(data, wrong))


def summary(rows: list[dict[str, Any]]) -> Any:
    """Longest seconds by phase and fault over all settings, and how many cases that are."""
    by_phase: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], {}).setdefault(row["fault"], []).append(row["seconds"] or 0.0)
    faults = sorted({fault for own in by_phase.values() for fault in own}, key=lambda fault: fault.split()[::-1])
    lines = [
        [phase, *(f"{max(own[fault]):.1f} ({len(own[fault])})" if fault in own else "" for fault in faults)]
        for phase, own in by_phase.items()
    ]
    return grid("longest seconds (cases)", ["phase", *faults], lines)


def details(data: dict[str, Any], shown: list[dict[str, Any]]) -> Any:
    def said(row: dict[str, Any]) -> str:
        return "; ".join(message.splitlines()[0].removeprefix("evenload: ") for message in row["messages"]) or "-"

    cells = {
        "case": "{case}",
        "seconds": lambda row: row["seconds"],
        "said": said,
        "left": lambda row: len(row["orphans"]),
        "good": lambda row: (row["last_good"] or "-").removeprefix("step0000000"),
        "lost": "{lost}",
        "twice": "{repeated}",
        "not as it should be": lambda row: ", ".join(row["faults"]) or "-",
    }
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    return columns("faults", shown, cells, f"{len(data['cases'])} cases, {wrong} not as they should be; {data['disk']}")


def restarts_table(data: dict[str, Any]) -> Any:
    cells = {
        "case": "{case}",
        "exit codes": lambda row: " ".join(map(str, row["codes"])),
        "resumed at step": lambda row: " ".join(map(str, dict.fromkeys(row["resumed_at"]))) or "-",
        "lost": "{lost}",
        "twice": "{repeated}",
        "losses apart": lambda row: row["loss_apart"],
        "not as it should be": lambda row: ", ".join(row["faults"]) or "-",
    }
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    caption = f"{len(data['cases'])} cases, {wrong} not as they should be"
    return columns("torchrun --max-restarts 2", data["cases"], cells, caption)


def replicas_table(data: dict[str, Any]) -> Any:
    cells = {
        "case": "{case}",
        "seconds": lambda row: row["seconds"],
        "steps alone": "{steps_alone}",
        "came back": lambda row: "yes" if row["came_back"] else "no",
        "lost": "{lost}",
        "twice": "{repeated}",
        "losses apart": lambda row: row["loss_apart"],
        "not as it should be": lambda row: ", ".join(row["faults"]) or "-",
    }
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    restart = f"torchrun's restart from a checkpoint took {data['restart_s']} s to the next step"
    return columns(
        "replicas", data["cases"], cells, f"{len(data['cases'])} cases, {wrong} not as they should; {restart}"
    )


def lost_and_back(only: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of --replicas."""
    references: dict[str, Path] = {}
    for fault in replicas.faults():
        if only in fault.name:
            if fault.kind not in references:
                references[fault.kind] = replicas.undisturbed(fault.kind, folder)
            row = replicas.run(fault, folder, references[fault.kind])
            print(f"{row['seconds']} s  {row['case']}: {row['faults'] or 'fine'}", file=sys.stderr)
            yield row


def restarted(only: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of --restarts."""
    reference = None
    for num_agents in (1, 2):
        for moment in restarts.MOMENTS:
            if only in f"{moment}, {num_agents} agents":
                reference = reference or restarts.undisturbed(folder)
                yield restarts.run(moment, num_agents, folder, reference)
    if only in restarts.RESIZED_CASE:
        yield restarts.resized(folder, restarts.undisturbed(folder, *restarts.RESIZED))


def all_cases(drill: Drill, only: str) -> Iterator[Case]:
    """Of every setting; which collectives it has takes a run to know, so that is asked only where they are wanted."""
    for setting in SETTINGS:
        possible = [case for case in cases_of(setting, COLLECTIVES) if only in case.name]
        collective = any(case.phase.where in COLLECTIVES and case.phase.name != "hand-over" for case in possible)
        yield from cases_of(setting, drill.collectives(setting) if collective else ())


def benchmark(asked: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evenload-drill-") as folder:
        if asked.restarts:
            return {"cases": list(restarted(asked.only, Path(folder)))}
        if asked.replicas:
            return {
                "cases": list(lost_and_back(asked.only, Path(folder))),
                "restart_s": replicas.restart_s(Path(folder)),
            }
        with closing(Drill(Path(folder))) as drill:
            rows = []
            for case in quick_cases() if asked.quick else all_cases(drill, asked.only):
                if asked.only in case.name:
                    rows.append(drill.run(case))
                    print(f"{rows[-1]['seconds']} s  {case.name}: {rows[-1]['faults'] or 'fine'}", file=sys.stderr)
        disk = "a full disk is a small tmpfs" if drill.has_disk else "a full disk is a limit of file sizes"
        return {"cases": rows, "disk": disk}


if __name__ == "__main__":
    main(options(__doc__, quick=False, restarts=False, replicas=False, only=""), benchmark, table)
