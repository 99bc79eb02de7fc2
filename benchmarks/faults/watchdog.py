"""What the watchdog takes of a training step: marks, heartbeats, the guard. Measured.

    python benchmarks/faults/watchdog.py [RECIPE] [key=value ...] [--pairs 30] [--steps 5] [--json] [--out FILE]

Ranks run the first global batch of a recipe (recipes/quickstart.yaml with files of up to 1K tokens, unless another is
named) again and again, at a learning rate of 0: --steps of them with the watchdog and as many without it make a pair,
and which comes first alternates. "share" is the median of what the watched half of a pair took over the other one, less
1, with its quartiles: of wall seconds of the slowest rank, and of CPU seconds of all ranks, which other programs on the
cores move less. Its parts are measured by themselves: a mark (with the launcher's file, which is a write into memory,
and without), how many a step sets, and CPU seconds of both threads in a second. "of its parts" is what these come to,
of a rank's CPU seconds in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import timeit
from typing import Any

import numpy as np
from evenload.api import load_plugins, load_recipe
from evenload.benchmarks.frame import main, options, started
from evenload.commands.tables.show import grid
from evenload.core.input.format import percent
from evenload.integrations.host.step import no_mark
from evenload.patches import bridge_cpu
from evenload.runtime.watchdog import marks
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.world import close_world, init_world
from evenload.training.job import Job, open_host
from evenload.training.preflight import preflight
from evenload.training.verbs.profile import machine

MARKS = 100_000
"""How many are timed."""
THREADS_S = 20.0
"""How long the threads are watched."""


def mark_s(folder: str | None) -> float:
    """Seconds of one mark."""
    os.environ.pop(marks.MARKS, None)
    if folder is not None:
        os.environ[marks.MARKS] = folder
    dog = Watchdog()
    steps = iter(range(10 * MARKS))
    return min(timeit.repeat(lambda: dog.at("forward of micro-batch 3", next(steps)), number=MARKS, repeat=5)) / MARKS


def threads_cpu_s() -> float:
    """CPU seconds of the watchdog's threads so far."""
    watching = [thread for thread in threading.enumerate() if thread.name.startswith("evenload-watchdog")]
    assert len(watching) == 2, watching
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in watching)


def on_rank(asked: argparse.Namespace) -> None:
    """One rank; the first one prints the answer."""
    load_plugins()
    recipe, pairs, steps = load_recipe(*recipe_of(asked)), asked.pairs, asked.steps
    if recipe.trainer == "megatron":
        bridge_cpu()
    world = init_world()
    ready = preflight(recipe, world.size)
    host = open_host(ready.recipe, world)
    job = Job(ready.recipe, world, host, ready.chain, Watchdog(), ready.source)
    planned = job.planner(job.drawing()).next()
    tokens_of = job.tokens_of(planned.draw)
    num_marks = 0

    def run(mark: Any) -> tuple[float, float]:
        """Seconds by the wall and of the CPU, of a step on average."""
        job.gather(0.0)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            host.train_step(planned.plan, tokens_of, lr=0.0, mark=mark)
        return (time.perf_counter() - start_s) / steps, (time.process_time() - start_cpu_s) / steps

    def watched() -> tuple[float, float]:
        nonlocal num_marks
        with Watchdog() as dog:

            def mark(where: str) -> None:
                nonlocal num_marks
                num_marks += 1
                dog.at(where, 3)

            num_marks = 0
            return run(mark)

    run(no_mark)
    rows = []
    for turn in range(pairs):
        if turn % 2:
            unwatched, ours = run(no_mark), watched()
        else:
            ours, unwatched = watched(), run(no_mark)
        each = job.gather(*ours, *unwatched)
        rows.append([each[:, 0].max(), each[:, 1].sum(), each[:, 2].max(), each[:, 3].sum()])
    with Watchdog():
        before_s = threads_cpu_s()
        time.sleep(THREADS_S)
        beats = float(job.gather((threads_cpu_s() - before_s) / THREADS_S)[:, 0].max())
        job.gather(0.0)
    if job.is_rank0:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            mark = {"bare_s": mark_s(None), "in_memory_s": mark_s(folder)}
        wall, cpu, bare_wall, bare_cpu = np.array(rows).T
        step_s, step_cpu_s = float(np.median(bare_wall)), float(np.median(bare_cpu)) / world.size
        parts = (num_marks / steps * mark["in_memory_s"] + beats * step_s) / step_cpu_s
        result = {
            **{"machine": machine(world.device), "host": host.describe(), "ranks": world.size},
            **{"pairs": pairs, "steps": steps, "step_s": step_s, "step_cpu_s": step_cpu_s},
            "share": {"wall": quartiles(wall / bare_wall - 1), "cpu": quartiles(cpu / bare_cpu - 1)},
            **{"marks": num_marks / steps, "mark": mark, "threads_cpu_s_per_s": beats, "of_its_parts": parts},
        }
        print(json.dumps(result))
    host.close()
    close_world(world)


def quartiles(values: Any) -> list[float]:
    low, median, high = statistics.quantiles(values.tolist(), n=4)
    return [low, median, high]


def recipe_of(asked: argparse.Namespace) -> tuple[str, list[str]]:
    named = bool(asked.words) and "=" not in asked.words[0]
    return (asked.words[0], asked.words[1:]) if named else ("quickstart", ["data.max_length=1024", *asked.words])


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    return started(__file__, load_recipe(*recipe_of(asked)).min_world_size)


def table(data: dict[str, Any]) -> Any:
    def share(name: str) -> str:
        low, median, high = data["share"][name]
        return f"{percent(median)} ({percent(low)} to {percent(high)})"

    rows = [
        ("share of a step, wall", share("wall")),
        ("share of a step, CPU", share("cpu")),
        ("of its parts", f"{100 * data['of_its_parts']:.3f} %"),
        ("step", f"{data['step_s']:.3f} s, {data['step_cpu_s']:.3f} CPU s a rank"),
        ("a mark", f"{1e6 * data['mark']['in_memory_s']:.2f} us, {1e6 * data['mark']['bare_s']:.2f} without a file"),
        ("marks in a step", data["marks"]),
        ("both threads", f"{1e3 * data['threads_cpu_s_per_s']:.2f} ms CPU in a second"),
    ]
    return grid(
        "watchdog",
        ("", ""),
        rows,
        f"{data['ranks']} ranks, {data['pairs']} pairs of {data['steps']} steps; {data['machine']}",
    )


if __name__ == "__main__":
    main(options(__doc__, words=..., pairs=30, steps=5), benchmark, table, on_rank)
