"""What adapters add to the bare frozen base, from one tenant to sixteen: the same samples, alternating in one run.

    python benchmarks/lora/bare.py [--tenants 1,4,16] [--samples 16] [--steps 20] [--json] [--out FILE]

One rank, hidden size 128, adapters of rank 16 on all linear layers. Every variant trains on the same samples, which
belong to so many tenants in turn. *Bare* is the frozen base with a single adapter of rank 1, on the queries of the
first layer: the backward runs as far as it does with adapters everywhere, and next to nothing is added. Passes are
forward and backward alone (`StepResult.busy_s`); a step has the sum of gradients and the update, too. Ratios are over
the bare base on the same step, their median and its 95 % interval. Measured.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.frame import interval, main, options
from evenload.benchmarks.lora.lora_ranks import ADAPTER, LONGEST, Batch, batch_of, on_rank, plan_of, train_of
from evenload.commands.tables.show import grid, stdout_aside
from evenload.core.input.format import seconds
from evenload.core.recipe.adapter import Adapter
from evenload.training.measuring import compare, in_turn

BARE = "bare"
SMALLEST = Adapter(r=1, target_modules=("model.layers.0.self_attn.q_proj",))
FIRST = 100
"""Number of the first tenant of a variant of k tenants, over k."""


def shared_by(batch: Batch, count: int) -> Batch:
    """The samples of a batch, belonging to so many tenants in turn."""
    tenants = FIRST * count + np.arange(len(batch.lengths)) % count
    return batch._replace(tenants=tenants.astype(np.int64))


def measured(job: Any, counts: list[int], samples: int, steps: int, longest: int) -> dict[str, Any]:
    """Rows of all steps, and what they come to."""
    adapters = job.host.adapters
    adapters.join(1, SMALLEST, train_of(1, samples))
    for count in counts:
        for number in range(FIRST * count, FIRST * count + count):
            adapters.join(number, ADAPTER, train_of(number, samples))
    rows = []
    for step in range(steps + 1):
        batch = batch_of(step, [1], samples, longest)
        batches = {BARE: batch, **{str(count): shared_by(batch, count) for count in counts}}
        plans = {name: plan_of(job.chain, own) for name, own in batches.items()}
        row: dict[str, Any] = {"step": step, "tokens": int(batch.lengths.sum()), "passes": {}, "seconds": {}}
        for name in in_turn(list(batches), step):
            rates = {int(number): 1e-3 for number in np.unique(batches[name].tenants)}
            begin = time.perf_counter()
            result = job.host.train_step(plans[name], batches[name].tokens, lr=rates)
            row["seconds"][name], row["passes"][name] = time.perf_counter() - begin, result.busy_s
        if step:  # the first warms up
            rows.append(row)
    return {"variants": summary(rows), "rows": rows, "host": job.host.describe()}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows come to, by variant."""
    result: dict[str, Any] = {}
    for name in sorted(rows[0]["seconds"], key=lambda name: 0 if name == BARE else int(name)):
        result[name] = {}
        for kind in ("passes", "seconds"):
            own = [row[kind][name] for row in rows]
            over = compare(own, [row[kind][BARE] for row in rows])
            result[name][kind] = {"median": float(np.median(own)), "over": over}
    return result


def table(result: dict[str, Any]) -> Any:
    rows = []
    for name, of_name in result["variants"].items():
        cells = ["bare base" if name == BARE else f"{name} tenant{'s' * (name != '1')}"]
        for kind in ("passes", "seconds"):
            over = of_name[kind]["over"]
            compared = ["", ""] if name == BARE else [f"{over['of_totals']:.2f}x", interval(over)]
            cells += [seconds(of_name[kind]["median"]), *compared]
        rows.append(cells)
    head = ("", "passes", "over bare", "95 %", "step", "over bare", "95 %")
    tokens = np.mean([row["tokens"] for row in result["rows"]])
    note = f"{tokens:,.0f} tokens a step on average; rank {ADAPTER.r} on all linear layers"
    return grid(f"adapters over the bare frozen base, {result['host']['device']}, measured", head, rows, note)


def benchmark(asked: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    with stdout_aside(), on_rank("dp1") as job:
        return measured(job, asked.tenants, asked.samples, asked.steps, asked.longest)


if __name__ == "__main__":
    main(options(__doc__, tenants=[1, 4, 16], samples=16, steps=20, longest=LONGEST), benchmark, table)
