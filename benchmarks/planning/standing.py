"""Busiest over mean, planner by planner: the standing table, which anybody's planner can enter. Predicted.

    python benchmarks/planning/standing.py [--only NAME] [--write] [--json]

A planner is a file in benchmarks/planning/standing/ with NAME, SOURCE (paper or code) and

    plan(lengths [S], num_ranks, cap) -> [rank][micro-batch][sample]

It deals the whole samples of one global batch to ranks, in micro-batches of at most ``cap`` tokens. Each sample comes
once, or there is no row. Work is verl's of a 7B model, 24,576 n + n^2 for a sample of n tokens; the figure is the
busiest rank's work over the mean, of the batches of a set together, 1 at best. Packs over the cap are counted: such a
row stands below those that keep it, since it may not run. Batches are drawn, alike on every machine.

--write puts the figures into standing.json (next to the planners) and benchmarks/results/standing.md; a test computes
them again.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import main, options
from evenload.commands.tables.show import grid
from evenload.core.plan.step_plan import Lengths, as_lengths

HERE = Path(__file__).parent
FIGURES = HERE / "standing" / "standing.json"
PAGE = HERE.parent / "results" / "standing.md"
BATCHES = 3


class Drawn(NamedTuple):
    """Log-normal lengths of a set, and who trains on them."""

    median: float
    shape: float
    longest: int
    num_samples: int
    num_ranks: int
    cap: int


SETS = {
    "instructions": Drawn(181, 0.9, 4096, 1024, 64, 8192),
    "documents": Drawn(665, 1.3, 16_384, 2048, 64, 16_384),
    "long tail": Drawn(6800, 1.1, 131_072, 512, 16, 131_072),
}
"""Assumptions, after instruction data, web pages and prompts of conversations."""


def batches(drawn: Drawn) -> Iterator[Lengths]:
    random = np.random.default_rng(1234)
    for _ in range(BATCHES):
        lengths = random.lognormal(np.log(drawn.median), drawn.shape, drawn.num_samples)
        yield as_lengths(lengths.astype(np.int64).clip(16, drawn.longest))


def planners() -> dict[str, dict[str, Any]]:
    """What each file of the folder has, by its NAME."""
    every = [runpy.run_path(str(path)) for path in sorted((HERE / "standing").glob("*.py"))]
    return {one["NAME"]: one for one in every}


def figure(planner: dict[str, Any], drawn: Drawn) -> dict[str, float]:
    """Busiest over mean, and the share of micro-batches over the cap. Raises ValueError where a sample is lost."""
    busiest = mean = 0.0
    over, count = 0, 0
    for lengths in batches(drawn):
        packs = planner["plan"](lengths, drawn.num_ranks, drawn.cap)
        samples = sorted(i for own in packs for pack in own for i in pack)
        if samples != list(range(len(lengths))) or len(packs) != drawn.num_ranks:
            raise ValueError(f"{planner['NAME']} does not deal each sample to one of {drawn.num_ranks} ranks once")
        work = 24576.0 * lengths + lengths**2.0
        busiest += max(sum(float(work[pack].sum()) for pack in own) for own in packs)
        mean += float(work.sum()) / drawn.num_ranks
        tokens = [int(lengths[pack].sum()) for own in packs for pack in own if pack]
        over, count = over + sum(t > drawn.cap for t in tokens), count + len(tokens)
    return {"busiest_over_mean": round(busiest / mean, 4), "over_cap": round(over / count, 4)}


def row_of(planner: dict[str, Any]) -> dict[str, Any]:
    return {"source": planner["SOURCE"], "sets": {name: figure(planner, drawn) for name, drawn in SETS.items()}}


def ranked(rows: dict[str, Any]) -> list[str]:
    """Names, those that keep the cap first, by the mean of their figures."""

    def place(name: str) -> tuple[bool, float]:
        own = rows[name]["sets"].values()
        return any(one["over_cap"] for one in own), sum(one["busiest_over_mean"] for one in own)

    return sorted(rows, key=place)


def lines(rows: dict[str, Any]) -> list[list[str]]:
    """A row for each planner; ``*``: with packs over the cap."""
    shown = []
    for name in ranked(rows):
        of_sets = rows[name]["sets"].values()
        cells = [f"{one['busiest_over_mean']:.4f}{'*' if one['over_cap'] else ''}" for one in of_sets]
        shown.append([name, *cells, rows[name]["source"]])
    return shown


HEAD = ("planner", *SETS, "source")
TABLE = re.compile(r"^\| planner \|.*\n(?:\|.*\n)*", re.MULTILINE)


def page_with(rows: dict[str, Any], text: str) -> str:
    """The page with these rows in place of the table that it has."""
    table = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    table += ["| " + " | ".join(cells) + " |" for cells in lines(rows)]
    return TABLE.sub("\n".join(table) + "\n", text, count=1)


def benchmark(asked: Any) -> dict[str, Any]:
    rows = {name: row_of(planner) for name, planner in planners().items() if asked.only in name}
    if asked.write:
        rows = json.loads(FIGURES.read_text()) | rows if FIGURES.exists() and asked.only else rows
        FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page_with(rows, PAGE.read_text()))
    return rows


def table(rows: dict[str, Any]) -> Any:
    return grid("busiest over mean, predicted", HEAD, lines(rows), "*: with micro-batches over the cap")


if __name__ == "__main__":
    main(options(__doc__, only="", write=False), benchmark, table)
