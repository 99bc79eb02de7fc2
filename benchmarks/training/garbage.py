"""Steps of a run with Python's garbage collected as ever, and on all ranks at once (`train.gc_every`): measured.

    python benchmarks/training/garbage.py [--recipe quickstart] [--ranks 2] [--every 1,10,50] [--block 20] \\
        [--rounds 6] [key=value ...] [--json] [--out FILE]

The same run takes blocks of steps in each mode by turns, the first round warms up. ``python`` is what Python does by
itself. A step's seconds are those of the slowest rank by the wall clock, its collection after it included; ``pause``
are the seconds in which a rank collected in or after it, of the rank that paused longest and in the mean of ranks.
Where other programs use the cores, pauses say more than steps: they are of the collecting rank alone.

``at 1,024``: predicted, the mean over steps of the longest pause of so many ranks that pause as these did, each by
itself: of all steps under ``python``, and in a collected step of those that were collected.

``left``: objects in cycles that nobody held any more, of one collection, on average: what waits for the next one.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from typing import Any

import numpy as np
from evenload.benchmarks.frame import Row, columns, described, main, on_job, options, started

PYTHON = "python"


def mode(every: int | None) -> str:
    return PYTHON if every is None else f"every {every}"


def measured(job: Any, modes: list[int | None], block: int, rounds: int) -> list[Row]:
    """A row a step. Collective."""
    from evenload.training.garbage import PAUSES, collected
    from evenload.training.measuring import in_turn, measure_step

    planner, rows, step = job.planner(job.drawing()), [], 0
    by_name = {mode(every): every for every in modes}
    freed: list[int] = []

    def note(phase: str, info: Any) -> None:
        if phase == "stop" and info["generation"] == 2:
            freed.append(info["collected"])

    gc.callbacks.append(note)
    for turn in range(rounds + 1):
        for name in in_turn(list(by_name), turn):
            with collected(by_name[name]) as collect:
                for _ in range(block):
                    freed.clear()
                    planned, before_s = planner.next(), PAUSES.seconds
                    job.gather(0.0)
                    begin_s = time.perf_counter()
                    taken = measure_step(job, planned, step, record=False)
                    collect(step + 1)
                    took = job.gather(time.perf_counter() - begin_s, PAUSES.seconds - before_s, sum(freed))
                    step += 1
                    if turn:
                        row = {"mode": name, "step": step, "seconds": float(took[:, 0].max())}
                        paused = {"most_pause_s": float(took[:, 1].max()), "pause_s": float(took[:, 1].mean())}
                        rows.append({**row, **paused, "left": took[0, 2], "loss": taken.result.loss})
    gc.callbacks.remove(note)
    return rows


def longest_s(pauses_s: list[float], draws: int) -> float:
    """The mean of the longest of so many draws, with replacement."""
    shares = (np.arange(len(pauses_s) + 1) / len(pauses_s)) ** draws
    return float(np.sum(np.sort(pauses_s) * np.diff(shares)))


def at_many_ranks_s(own: list[Row], draws: int) -> float:
    """Seconds of a step, on average, in which the longest of many ranks collects."""
    every = int(own[0]["mode"].split()[1]) if own[0]["mode"] != PYTHON else 1
    groups = [
        [row["most_pause_s"] for row in own if (row["step"] % every == 0) == at_once] for at_once in (True, False)
    ]
    return sum(longest_s(group, draws) * len(group) for group in groups if group) / len(own)


def summary(rows: list[Row], num_ranks: int) -> Row:
    """What the rows come to, by mode."""
    result = {}
    for name in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == name]
        took, left = np.array([row["seconds"] for row in own]), [row["left"] for row in own if row["left"]]
        result[name] = {
            "steps": len(own),
            **{f"p{share}_s": float(np.percentile(took, share)) for share in (50, 90, 99)},
            "most_s": float(took.max()),
            "pause_s": float(np.mean([row["pause_s"] for row in own])),
            "most_pause_s": float(np.mean([row["most_pause_s"] for row in own])),
            "p99_pause_s": float(np.percentile([row["most_pause_s"] for row in own], 99)),
            "at_1024_s": at_many_ranks_s(own, round(1024 / num_ranks)),
            "left": float(np.mean(left)) if left else 0.0,
        }
    return result


def on_rank(asked: argparse.Namespace) -> None:
    modes: list[int | None] = [None, *asked.every]

    def work(job: Any) -> Row:
        rows = measured(job, modes, asked.block, asked.rounds)
        most_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "modes": summary(rows, asked.ranks),
            "rows": rows,
            "objects": len(gc.get_objects()),
            "rss_bytes": most_bytes,
            **described(job),
        }

    steps = (asked.rounds + 1) * asked.block * len(modes) + 1
    on_job(asked.recipe, [*asked.settings, f"train.steps={steps}"], work)


def benchmark(asked: argparse.Namespace) -> Row:
    return started(__file__, asked.ranks)


def table(result: Row) -> Any:
    times = {"p50": "p50_s", "p90": "p90_s", "p99": "p99_s", "longest": "most_s", "pause, mean rank": "pause_s"}
    times |= {"longest rank": "most_pause_s", "p99 of it": "p99_pause_s", "at 1,024": "at_1024_s"}
    cells = {"": "{mode}", "steps": "{steps}", **{head: f"{{{key}:seconds}}" for head, key in times.items()}}
    rows = [{"mode": name, **one} for name, one in result["modes"].items()]
    host, objects = result["host"], result["objects"]
    title = f"garbage under {host['trainer']}, {host['device']}, {objects:,} objects, measured"
    return columns(title, rows, cells | {"left": "{left:,.0f}"})


if __name__ == "__main__":
    own = options(__doc__, recipe="quickstart", ranks=2, every=[1, 10, 50], block=20, rounds=6, settings=...)
    main(own, benchmark, table, on_rank)
