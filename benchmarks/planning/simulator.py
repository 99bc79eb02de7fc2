"""How fast a step is simulated: ranks of 64 micro-batches each, without and with the timeline.

    python benchmarks/planning/simulator.py [--layouts dp=1024,dp=256/pp=4,dp=128/tp=8] [--micro-batches 64] \\
        [--runs 5] [--json]
                                   [--out FILE]

Model, cluster and costs are those of recipes/gpu-node.yaml; lengths are log-normal (median 1,100 tokens, shape 1.2), a
sequence a micro-batch, dealt in turn. Seconds are the least of the runs, measured; the plan is made before.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import seconds
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.step import simulate

LAYOUTS = "dp=1024,dp=256/pp=4,dp=128/tp=8"


def measure(words: list[str], micro_batches: int, runs: int) -> dict[str, Any]:
    """One layout."""
    recipe = load_recipe(
        RECIPES / "gpu-node.yaml", ["train.global_batch_size=65536", *(f"parallel.{word}" for word in words)]
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    ranks = chain.limits.num_ranks
    lengths = np.random.default_rng(0).lognormal(np.log(1100), 1.2, ranks * micro_batches).astype(int).clip(2, 32768)
    dealt = tuple(MicroBatch((Slice(i, 0, int(n)),), (i % ranks,)) for i, n in enumerate(lengths))
    plan = check(StepPlan(as_lengths(lengths), dealt, replace(chain.limits, max_tokens=32768)))
    row: dict[str, Any] = {"layout": " ".join(words), "ranks": recipe.layout().world_size, "passes": 2 * len(dealt)}
    for name, record in (("simulate_s", False), ("with_timeline_s", True)):
        times = []
        for _ in range(runs):
            began = time.perf_counter()
            outcome = simulate(plan, chain.context, record=record)
            times.append(time.perf_counter() - began)
        row[name] = min(times)
    return {**row, "step_s": outcome.step_s, "bubble_frac": outcome.bubble_frac, "exposed_frac": outcome.exposed_frac}


def table(result: dict[str, Any]) -> Any:
    rows = [
        (r["layout"], r["ranks"], r["passes"], seconds(r["simulate_s"]), seconds(r["with_timeline_s"]))
        for r in result["rows"]
    ]
    caption = f"least of {result['runs']} runs on {result['machine']}"
    head = ("layout", "ranks", "passes a stage", "simulated in", "with the timeline")
    return grid(f"simulating {result['micro_batches']} micro-batches a rank", head, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = parser.parse_args()
    layouts = [layout.split("/") for layout in arguments.layouts.split(",")]
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "micro_batches": arguments.micro_batches,
        "runs": arguments.runs,
        "rows": [measure(words, arguments.micro_batches, arguments.runs) for words in layouts],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, arguments.json, table)


if __name__ == "__main__":
    main()
