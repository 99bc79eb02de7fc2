"""What checkpoints cost a run: their hashes, or that they are written before training goes on; alternating in one run.

    python benchmarks/faults/checkpoints.py [RECIPE] [key=value ...] [--background] [--repeats 5] [--json] [--out FILE]

One rank trains a step and saves, again and again; every other save leaves the hashes out. Printed are the medians of a
step, of a save with and without hashes, and of comparing all hashes before a load, and what hashes add to a run that
saves every `checkpoint.every` steps.

With ``--background`` every other save is one in the background (`checkpoint.background`), and the next step waits until
it is written: printed are the seconds by which a save holds up the run.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.frame import main, options
from evenload.commands.tables.show import grid
from evenload.runtime import files
from evenload.training.checkpoint import checkpoints
from evenload.training.checkpoint.resuming import Background, keep
from evenload.training.job import Job, open_trainer, open_world

SIZES = ("parallel.dp=1", "model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8")


def sizes_alone(folder: Path, names: Any) -> dict[str, files.File]:
    """`files.stamp` without hashes."""
    return {name: files.File((folder / name).stat().st_size, "") for name in names}


def measure(job: Job, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of steps, saves and comparisons."""
    seconds: dict[str, list[float]] = {"step": [], "save with hashes": [], "save without": [], "compare hashes": []}
    hashing, planner = files.stamp, job.planner(job.drawing())

    def timed(name: str, start: float) -> None:
        seconds[name].append(time.perf_counter() - start)

    for repeat in range(2 * repeats + 1):
        planned = planner.next()
        start = time.perf_counter()
        job.host.train_step(planned.plan, job.tokens_of(planned.draw), lr=1e-4)
        timed("step", start)
        hashed = repeat % 2 == 1
        files.stamp = hashing if hashed else sizes_alone
        start = time.perf_counter()
        keep(job, folder, repeat, planned.draw.state)
        if repeat:  # the first warms up
            timed("save with hashes" if hashed else "save without", start)
        if hashed:
            start = time.perf_counter()
            checkpoints.newest_whole(folder)
            timed("compare hashes", start)
    files.stamp = hashing
    result = summary(folder, seconds)
    medians, every = result["seconds"], job.recipe.checkpoint.every
    added = medians["save with hashes"] - medians["save without"]
    run_s = every * medians["step"] + medians["save without"]
    return {**result, "every": every, "added_frac": added / run_s}


def measure_background(job: Job, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds by which saves in the foreground and in the background hold up a run."""
    seconds: dict[str, list[float]] = {"step": [], "save, foreground": [], "save, background": []}
    planner = job.planner(job.drawing())
    with Background(job) as background:
        for repeat in range(2 * repeats + 2):
            planned = planner.next()
            started = time.perf_counter()
            job.host.train_step(planned.plan, job.tokens_of(planned.draw), lr=1e-4)
            stepped = time.perf_counter()
            is_behind = repeat % 2 == 1
            keep(job, folder, repeat, planned.draw.state, background=background if is_behind else None)
            if repeat > 1:  # the first of each warms up
                seconds["step"].append(stepped - started)
                seconds["save, background" if is_behind else "save, foreground"].append(time.perf_counter() - stepped)
            background.wait()
    return summary(folder, seconds)


def summary(folder: Path, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, next to the size of the checkpoint that was written last."""
    newest = checkpoints.newest_whole(folder)
    assert newest is not None
    size = sum(file.stat().st_size for file in newest[0].rglob("*") if file.is_file())
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return {"mib": size / 2**20, "seconds": medians, "all": seconds}


def table(result: dict[str, Any]) -> Any:
    rows = [(name, f"{value:.3f} s") for name, value in result["seconds"].items()]
    if "added_frac" in result:
        rows.append((f"hashes add to a run that saves every {result['every']} steps", f"{result['added_frac']:.3%}"))
    return grid(f"checkpoints of {result['mib']:.0f} MiB on one rank", ("", "median"), rows, "")


def benchmark(asked: Any) -> dict[str, Any]:
    recipe, *words = asked.words if asked.words and "=" not in asked.words[0] else ["quickstart", *asked.words]
    ready = load_recipe(recipe, [*SIZES, *words])
    with (
        tempfile.TemporaryDirectory(prefix="checkpoints-") as folder,
        open_world(ready) as (world, watchdog),
        open_trainer(ready, world, watchdog) as job,
    ):
        measured = measure_background if asked.background else measure
        return measured(job, Path(folder), asked.repeats)


if __name__ == "__main__":
    main(options(__doc__, words=..., background=False, repeats=5), benchmark, table)
