"""A long run that is resumed again and again on other numbers of ranks, beside one that nothing disturbs.

    python benchmarks/faults/soak.py recipes/quickstart.yaml train.steps=500 --every 50 \\
        --worlds "parallel.dp=4; parallel.dp=2; parallel.dp=1" [key=value ...] [--json FILE]

Both train the same recipe from the same weights. Of the disturbed one every ``--every`` steps the ranks end, and those
of the next layout of ``--worlds`` go on from the checkpoint. Compared are the samples of every step and its loss. Of
the undisturbed one memory, file descriptors and threads of every rank are read from the system once a second; after
the first fifth of its time they should stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.commands.tables.show import grid
from rich.console import Console

_SETTLED = 0.2
"""Share of a run after which nothing should grow any more."""


def train(recipe: str, words: list[str], watch: Watch | None = None) -> list[dict[str, Any]]:
    """The steps of ``evenload train``. Raises CalledProcessError."""
    command = [sys.executable, "-m", "evenload", "train", recipe, *words, "--json"]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean)
    if watch is not None:
        watch.over(job.pid)
    out, _ = job.communicate()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, command)
    steps: list[dict[str, Any]] = json.loads(out)["steps"]
    return steps


class Watch:
    """What the ranks below a launcher hold, read once a second: (seconds, rank, bytes, descriptors, threads)."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, int, int]] = []

    def over(self, launcher: int) -> None:
        """Watch until the launcher has no children any more, in a thread."""
        threading.Thread(target=self._watch, args=(launcher, time.monotonic()), daemon=True).start()

    def _watch(self, launcher: int, start: float) -> None:
        while Path(f"/proc/{launcher}").exists():
            for rank, child in enumerate(sorted(_children(launcher))):
                try:
                    status = dict(line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
                    held = int(status["VmRSS"].split()[0]) << 10
                    row = (held, len(os.listdir(f"/proc/{child}/fd")), int(status["Threads"]))
                except (OSError, KeyError):
                    continue
                self.rows.append((time.monotonic() - start, rank, *row))
            time.sleep(1.0)

    def growth(self) -> dict[str, Any]:
        """Medians of what each rank held in the first and in the last third of its time after settling."""
        rows = np.array(self.rows)
        rows = rows[rows[:, 0] > _SETTLED * rows[-1, 0]]
        # The end of a run tears down what it held.
        rows = rows[rows[:, 0] < rows[-1, 0] - 5.0]
        held = {}
        for rank in np.unique(rows[:, 1]).astype(int).tolist():
            own = rows[rows[:, 1] == rank]
            third = max(1, len(own) // 3)
            first, last = np.median(own[:third], axis=0), np.median(own[-third:], axis=0)
            held[f"rank {rank}"] = {
                "mib": [first[2] / 2**20, last[2] / 2**20],
                "descriptors": [int(first[3]), int(last[3])],
                "threads": [int(first[4]), int(last[4])],
            }
        return held


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def samples(log: Path) -> dict[int, list[int]]:
    """The samples of every step that a run has logged."""
    return {row["step"]: row["samples"] for row in map(json.loads, log.read_text().splitlines())}


def soak(recipe: str, words: list[str], every: int, worlds: list[list[str]]) -> dict[str, Any]:
    """Both runs and what they differ in."""
    steps, watch = load_recipe(recipe, words).train.steps, Watch()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        whole = train(recipe, [*words, *worlds[0], f"log.jsonl={folder}/whole.jsonl"], watch)
        rows: list[dict[str, Any]] = []
        for number, stop in enumerate(range(every, steps + every, every)):
            world = worlds[number % len(worlds)]
            kept = [f"checkpoint.dir={folder}/kept", f"checkpoint.every={every}", f"log.jsonl={folder}/parts.jsonl"]
            rows += train(recipe, [*words, *world, *kept, f"train.steps={min(stop, steps)}"])
            print(f"step {len(rows)} of {steps}, {' '.join(world)}: loss {rows[-1]['loss']:.6f}", file=sys.stderr)
        own, other = samples(folder / "whole.jsonl"), samples(folder / "parts.jsonl")
    losses, others = np.array([row["loss"] for row in whole]), np.array([row["loss"] for row in rows])
    errors = np.abs(others - losses) / np.abs(losses)
    seen = [s for step in sorted(other) for s in other[step]]
    expected = [s for step in sorted(own) for s in own[step]]
    return {
        "recipe": recipe,
        "overrides": words,
        "worlds": [" ".join(world) for world in worlds],
        "steps": steps,
        "resumed": len(range(every, steps, every)),
        "samples": len(expected),
        "samples_in_order": seen == expected,
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-1]),
        "loss_rel_err": float(errors.max()),
        "loss_rel_err_at_step": int(errors.argmax()),
        "held": watch.growth(),
    }


def table(result: dict[str, Any]) -> Any:
    rows = [
        ("steps, resumes", f"{result['steps']}, {result['resumed']} on {', '.join(result['worlds'])}"),
        ("samples in the order of an undisturbed run", f"{result['samples_in_order']} ({result['samples']:,})"),
        ("loss, first and last", f"{result['loss_first']:.6f}, {result['loss_last']:.6f}"),
        ("loss, largest relative error", f"{result['loss_rel_err']:.1e} at step {result['loss_rel_err_at_step']}"),
    ]
    for rank, held in result["held"].items():
        mib = "{:.0f} -> {:.0f} MiB".format(*held["mib"])
        counts = "{} -> {} descriptors, ".format(*held["descriptors"]) + "{} -> {} threads".format(*held["threads"])
        rows.append((f"{rank} held, first and last third", f"{mib}, {counts}"))
    return grid(f"soak of {result['recipe']}", ("", ""), rows, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--worlds", required=True, help="overrides of each layout in turn, separated by semicolons")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    worlds = [one.split() for one in arguments.worlds.split(";")]
    result = soak(arguments.recipe, arguments.words, arguments.every, worlds)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    Console(width=140).print(table(result))


if __name__ == "__main__":
    main()
