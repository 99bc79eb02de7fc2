"""How fast a step is simulated: ranks of 64 micro-batches each, without and with the timeline.

    python benchmarks/planning/simulator.py [--layouts dp=1024,dp=256/pp=4,dp=128/tp=8] [--micro-batches 64] \\
        [--runs 5] [--json]
                                   [--out FILE]

Model, cluster and costs are those of recipes/gpu-node.yaml; lengths are log-normal (median 1,100 tokens, shape 1.2), a
sequence a micro-batch, dealt in turn. Seconds are the least of the runs, measured; the plan is made before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.frame import Row, columns, machine, main, options, timed
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.simulate.step import simulate


def measure(words: list[str], micro_batches: int, runs: int) -> Row:
    """One layout."""
    recipe = load_recipe("gpu-node", ["train.global_batch_size=65536", *(f"parallel.{word}" for word in words)])
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    ranks = chain.limits.num_ranks
    lengths = np.random.default_rng(0).lognormal(np.log(1100), 1.2, ranks * micro_batches).astype(int).clip(2, 32768)
    dealt = tuple(MicroBatch((Slice(i, 0, int(n)),), (i % ranks,)) for i, n in enumerate(lengths))
    plan = check(StepPlan(as_lengths(lengths), dealt, replace(chain.limits, max_tokens=32768)))
    row: Row = {"layout": " ".join(words), "ranks": recipe.layout().world_size, "passes": 2 * len(dealt)}
    for name, record in (("simulate_s", False), ("with_timeline_s", True)):
        outcome, row[name] = timed(lambda record=record: simulate(plan, chain.context, record=record), runs)
    return {**row, "step_s": outcome.step_s, "bubble_frac": outcome.bubble_frac, "exposed_frac": outcome.exposed_frac}


def table(result: Row) -> Any:
    cells = {"layout": "{layout}", "ranks": "{ranks}", "passes a stage": "{passes}"}
    cells |= {"simulated in": "{simulate_s:seconds}", "with the timeline": "{with_timeline_s:seconds}"}
    caption = f"least of {result['runs']} runs on {result['machine']}"
    return columns(f"simulating {result['micro_batches']} micro-batches a rank", result["rows"], cells, caption)


def benchmark(asked: Any) -> Row:
    rows = [measure(layout.split("/"), asked.micro_batches, asked.runs) for layout in asked.layouts]
    return {"machine": machine(), "micro_batches": asked.micro_batches, "runs": asked.runs, "rows": rows}


if __name__ == "__main__":
    layouts = ["dp=1024", "dp=256/pp=4", "dp=128/tp=8"]
    main(options(__doc__, layouts=layouts, micro_batches=64, runs=5), benchmark, table)
