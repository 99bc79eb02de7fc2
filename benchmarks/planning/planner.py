"""How fast and how even evenload plans, beside every baseline: K sequences on R ranks; imbalance is predicted.

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

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from evenload.api import load_recipe
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.predict import micro_batch_imbalance, predict
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import SampleOrder

SEED = 1234
DIFFERENCING_LIMIT = 1 << 22
"""Largest sequences x ranks for Karmarkar-Karp, which holds a list of that size and takes minutes beyond."""

Lengths = npt.NDArray[np.int64]


def synthetic(count: int, max_length: int) -> Lengths:
    """A heavy tail; a function of its arguments alone."""
    lengths = np.random.default_rng(SEED).lognormal(np.log(1100), 1.2, count)
    return cut(lengths.astype(np.int64), max_length, "split", 2).length


def batches(lengths: Lengths, size: int, count: int) -> Iterator[Lengths]:
    """Global batches as training draws them; samples repeat where the file holds fewer than one batch."""
    lengths = np.tile(lengths, -(-size // len(lengths)))
    order = SampleOrder(len(lengths), SEED)
    for _ in range(count):
        drawn, order = order.take(size)
        yield as_lengths(lengths[drawn])


def measure(
    lengths: Lengths, max_length: int, size: int, num_ranks: int, runs: int, words: list[str]
) -> list[dict[str, Any]]:
    """One row a planner: medians over ``runs`` batches, the same for all."""
    sizes = {
        "parallel.dp": num_ranks,
        "train.global_batch_size": size,
        "data.max_length": max_length,
        "plugins.packing.max_tokens": 2 * max_length,
    }
    recipe = load_recipe(RECIPES / "gpu-node.yaml", [*(f"{key}={value}" for key, value in sizes.items()), *words])
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    drawn = list(batches(lengths, size, runs))
    bounds = [chain.plan(batch).bound_s for batch in drawn]
    rows = []
    for name in ("", *chain.baseline_names):
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


def benchmark(
    file: Path | None, max_length: int, sizes: list[tuple[int, int]], runs: int, words: list[str]
) -> dict[str, Any]:
    """All sizes on one source of lengths. Raises EvenloadError for a file that holds none."""
    largest = max(size for size, _ in sizes)
    if file is None:
        lengths = synthetic(4 * largest, max_length)
    else:
        lengths = cut(read_lengths(file), max_length, "split", 2).length
    return {
        "predicted": True,
        "lengths": "synthetic" if file is None else file.name,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "max_length": max_length,
        "runs": runs,
        "overrides": words,
        "rows": [row for size, ranks in sizes for row in measure(lengths, max_length, size, ranks, runs, words)],
    }


def table(result: dict[str, Any]) -> Any:
    rows = [
        (
            f"{r['sequences']} x {r['ranks']}",
            r["planner"],
            seconds(r["plan_s"]),
            f"{r['imbalance']:.4f}",
            f"{r['step_over_bound']:.4f}",
            f"{r['longest_over_mean']:.2f}",
            f"{r['micro_batch_imbalance_forward']:.3f}, {r['micro_batch_imbalance_backward']:.3f}",
            f"{r['worst_micro_batch_imbalance_forward']:.3f}, {r['worst_micro_batch_imbalance_backward']:.3f}",
        )
        for r in result["rows"]
    ]
    head = (
        "sequences x ranks",
        "planner",
        "planning",
        "imbalance",
        "step / bound",
        "longest / mean",
        "micro-batches F, B",
        "at worst",
    )
    caption = f"medians of {result['runs']} batches; planning measured on {result['machine']}, all else predicted"
    return grid(f"planners on {result['lengths']} lengths", head, rows, caption)


def _sizes(text: str) -> list[tuple[int, int]]:
    pairs = [word.split("x") for word in text.split(",")]
    return [(int(size), int(ranks)) for size, ranks in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help=".npy, .txt, .jsonl or Megatron .idx")
    parser.add_argument("--max-length", type=int, default=8192, help="Tokens.")
    parser.add_argument("--sizes", type=_sizes, default=_sizes("512x64,4096x256,65536x1024"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("words", nargs="*", metavar="key=value", help="Overrides of the recipe.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = parser.parse_args()
    result = benchmark(arguments.lengths, arguments.max_length, arguments.sizes, arguments.runs, arguments.words)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, arguments.json, table)


if __name__ == "__main__":
    main()
