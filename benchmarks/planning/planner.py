"""How fast and how even evenload plans, against every baseline: K sequences on R ranks; imbalance is predicted.

    python benchmarks/planning/planner.py [--lengths FILE] [--max-length 8192] [--sizes 512x64,4096x256,65536x1024] \\
        [--runs 5]
                                 [--json] [--out FILE] [key=value ...]

Without --lengths, lengths are a log-normal of median 1,100 tokens and shape 1.2, a heavy tail like that of web text.
With it, batches are drawn from the file as training would draw them. Longer samples than --max-length are split, and a
micro-batch holds twice as many tokens. Model, cluster and costs are those of recipes/gpu-node.yaml; trailing words
override any of its keys (plugins.packing.max_tokens=16384 train.recompute=true costs=verl-7b). Planning includes the
check of every law. "longest / mean" is what the costliest sequence costs over a rank's mean share: above 1, that
sequence alone bounds the step, and planners cannot differ much. "micro-batches F, B" is the costliest micro-batch over
the mean one, forward and backward: the median of batches, then the worst.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.api import load_recipe
from evenload.benchmarks.chains import batches, body_of
from evenload.benchmarks.frame import Row, columns, machine, main, options
from evenload.core.plan.step_plan import Lengths, StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.simulate.predict import micro_batch_imbalance, predict

DIFFERENCING_LIMIT = 1 << 22
"""Largest sequences x ranks for Karmarkar-Karp, which holds a list of that size and takes minutes beyond."""


def measure(asked: Any, lengths: Lengths, size: int, num_ranks: int) -> list[Row]:
    """One row a planner: medians over ``--runs`` batches, the same for all."""
    sizes = {
        "parallel.dp": num_ranks,
        "train.global_batch_size": size,
        "data.max_length": asked.max_length,
        "plugins.packing.max_tokens": 2 * asked.max_length,
    }
    recipe = load_recipe("gpu-node", [*(f"{key}={value}" for key, value in sizes.items()), *asked.words])
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    drawn = list(batches(lengths, size, asked.runs))
    bounds = [chain.plan(batch).bound_s for batch in drawn]
    rows = []
    for name in ("", *chain.rivals.names):
        if name == "karmarkar_karp" and size * num_ranks > DIFFERENCING_LIMIT:
            continue
        steps = [_step(replace(chain, instead=name), *pair) for pair in zip(drawn, bounds, strict=True)]
        medians = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        worst = {f"worst_{key}": max(step[key] for step in steps) for key in steps[0] if key.startswith("micro_batch_")}
        rows.append({"sequences": size, "ranks": num_ranks, "planner": name or "evenload", **medians, **worst})
    return rows


def _step(chain: PlanChain, batch: Lengths, bound_s: float) -> dict[str, float]:
    began = time.perf_counter()
    plan: StepPlan = chain.plan(batch)
    plan_s = time.perf_counter() - began
    predicted = predict(plan, chain.context.costs)
    forward, backward = micro_batch_imbalance(plan, chain.context.costs)
    cost_s = chain.context.costs.sequence_s(batch)
    return {
        "plan_s": plan_s,
        "imbalance": max(predicted.busy_s) * len(predicted.busy_s) / sum(predicted.busy_s),
        "step_over_bound": predicted.step_s / bound_s,
        "busiest_over_bound": max(predicted.busy_s) / bound_s,
        "micro_batch_imbalance_forward": forward,
        "micro_batch_imbalance_backward": backward,
        "longest_over_mean": float(cost_s.max() / cost_s.sum() * chain.limits.num_ranks),
        "padding_frac": plan.padding_frac,
        "micro_batches": len(plan.micro_batches),
    }


def benchmark(asked: Any) -> Row:
    """All sizes on one source of lengths. Raises EvenloadError for a file that holds none."""
    sizes = [tuple(map(int, words.split("x"))) for words in asked.sizes]
    lengths = body_of(asked.lengths, 4 * max(size for size, _ in sizes), asked.max_length)
    return {
        "predicted": True,
        "lengths": asked.lengths.name if asked.lengths else "synthetic",
        "machine": machine(),
        "max_length": asked.max_length,
        "runs": asked.runs,
        "overrides": asked.words,
        "rows": [row for size, ranks in sizes for row in measure(asked, lengths, size, ranks)],
    }


def table(result: Row) -> Any:
    cells = {
        "sequences x ranks": "{sequences} x {ranks}",
        "planner": "{planner}",
        "planning": "{plan_s:seconds}",
        "imbalance": "{imbalance:.4f}",
        "step / bound": "{step_over_bound:.4f}",
        "longest / mean": "{longest_over_mean:.2f}",
        "micro-batches F, B": "{micro_batch_imbalance_forward:.3f}, {micro_batch_imbalance_backward:.3f}",
        "at worst": "{worst_micro_batch_imbalance_forward:.3f}, {worst_micro_batch_imbalance_backward:.3f}",
    }
    caption = f"medians of {result['runs']} batches; planning measured on {result['machine']}, all else predicted"
    return columns(f"planners on {result['lengths']} lengths", result["rows"], cells, caption)


if __name__ == "__main__":
    sizes = ["512x64", "4096x256", "65536x1024"]
    main(options(__doc__, lengths=Path, max_length=8192, sizes=sizes, runs=5, words=...), benchmark, table)
