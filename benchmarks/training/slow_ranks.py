"""A run of two ranks of which one is made slow, and what `train` says of it: measured.

    python benchmarks/training/slow_ranks.py [--causes none,data,compute,host] [--steps 41] [key=value ...] [--json]

    none      nothing is disturbed
    data      rank 1 sleeps for 30 ms with every sample that it reads
    compute   each pass of rank 1 takes four times its CPU seconds
    host      two processes that compute share the core of rank 1, and nothing else

``loss`` is the last step's: what slows a rank changes no number.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenload.benchmarks.frame import begun, columns, main, options, result_of

SLOW = 1
SMALL = ("data.max_length=256", "plugins.packing.max_tokens=512", "train.global_batch_size=8", "model.num_layers=2")


def slow_data() -> None:
    from evenload.training.job import Job

    read = Job.tokens_of

    def tokens_of(self: Job, draw: Any) -> Any:
        own = read(self, draw)
        return lambda index: (time.sleep(0.03), own(index))[1]

    Job.tokens_of = tokens_of  # type: ignore[method-assign]


def slow_compute() -> None:
    from evenload.runtime.measure.busy import BusyClock

    count = BusyClock.running

    @contextmanager
    def running(self: BusyClock, kind: Any, micro_batch: int = -1) -> Iterator[None]:
        with count(self, kind, micro_batch):
            start_s = time.thread_time()
            yield
            until_s = start_s + 4 * (time.thread_time() - start_s)
            while time.thread_time() < until_s:
                pass

    BusyClock.running = running  # type: ignore[method-assign]


def slow_host() -> None:
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    for _ in range(2):
        parent = os.getpid()
        if not os.fork():
            while os.getppid() == parent:
                sum(range(10_000))
            os._exit(0)


SLOWED = {"none": lambda: None, "data": slow_data, "compute": slow_compute, "host": slow_host}


def on_rank(asked: argparse.Namespace) -> None:
    from evenload.api import load_recipe
    from evenload.training.verbs.train import train

    (cause,) = asked.causes
    if int(os.environ["RANK"]) == SLOW:
        SLOWED[cause]()
    result = train(load_recipe("quickstart", [*SMALL, f"train.steps={asked.steps}", *asked.settings]))
    if result is not None:
        steps_s = sum(row["step_s"] for row in result["steps"][1:])
        row = {"planted": cause, "step_s": steps_s / (asked.steps - 1), "loss": result["loss"]}
        print(json.dumps({**row, "stragglers": result["stragglers"]}))


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    words = ["--steps", str(asked.steps)]
    jobs = ([*asked.settings, "--causes", cause, *words] for cause in asked.causes)
    return {"rows": [result_of(begun(__file__, job, 2)) for job in jobs]}


def table(result: dict[str, Any]) -> Any:
    cells = {
        "planted in rank 1": "{planted}",
        "step": lambda row: f"{1e3 * row['step_s']:.0f} ms",
        "named": lambda row: ", ".join(map(said, row["stragglers"])) or "nobody",
        "last loss": "{loss:.4f}",
    }
    return columns("one slow rank of two, measured", result["rows"], cells)


def said(row: dict[str, Any]) -> str:
    who = "all" if row["rank"] is None else f"rank {row['rank']}"
    return f"{who} {row['cause']} {100 * row['share']:.0f} %"


if __name__ == "__main__":
    main(options(__doc__, settings=..., causes=list(SLOWED), steps=41), benchmark, table, on_rank)
