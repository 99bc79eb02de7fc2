"""Tenants together against one after another, each well packed: the same batches, alternating in one run. Measured.

    python benchmarks/lora/together.py [--layout dp2] [--samples 4,8,16] [--tenants 4] [--steps 20] [--json] \\
        [--out FILE]
    python benchmarks/lora/together.py --layout pp2 --samples 4

Four tenants with adapters of rank 16 train on 2 CPU ranks (``pp2``: a pipeline of two stages) with so many short
instruction samples each a step. *Together*: their samples share one planned step. *One after another*: each has a step
of its own, planned by the same plugins over all ranks; four of them are compared with the one. Both variants train
adapters of their own from equal starts on equal samples, so their losses must agree: ``apart`` is the largest relative
difference. Seconds are those of the slowest rank by the wall clock, planning left out; the ratio's median has its 95 %
interval. ``predicted`` is the same ratio in simulated seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from evenload.benchmarks.frame import columns, interval, main, options, started
from evenload.benchmarks.lora.lora_ranks import (
    ADAPTER,
    LONGEST,
    Batch,
    batch_of,
    on_rank,
    plan_of,
    train_of,
    trained,
)

TOGETHER, ALONE = "together", "one after another"
APART = 1000
"""Between the numbers of a tenant's two adapters."""


def measured(job: Any, tenants: int, samples: int, steps: int, longest: int) -> dict[str, Any]:
    """One number of samples, all steps. Collective."""
    from evenload.core.simulate.step import simulate
    from evenload.training.measuring import compare, in_turn

    numbers = range(1, tenants + 1)
    for number in numbers:
        for own in (number, number + APART):
            job.host.adapters.join(own, ADAPTER, train_of(number, samples))
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        batch = batch_of(step, list(numbers), samples, longest)
        parts = {TOGETHER: [batch], ALONE: [batch.of(number).renumbered(APART) for number in numbers]}
        plans = {name: [plan_of(job.chain, part) for part in own] for name, own in parts.items()}
        row: dict[str, Any] = {"step": step, "tokens": int(batch.lengths.sum()), "seconds": {}, "losses": {}}
        row["predicted"] = {
            name: sum(simulate(plan, job.chain.context, record=False).step_s for plan in own)
            for name, own in plans.items()
        }
        for name in in_turn([TOGETHER, ALONE], step):
            row["seconds"][name], losses = _take(job, list(zip(plans[name], parts[name], strict=True)))
            row["losses"][name] = [losses[number + APART * (name == ALONE)] for number in numbers]
        if step:  # the first warms up
            rows.append(row)
    for own in list(job.host.adapters.numbers):
        job.host.adapters.leave(own)
    seconds = {name: [row["seconds"][name] for row in rows] for name in (TOGETHER, ALONE)}
    predicted = [sum(row["predicted"][name] for row in rows) for name in (ALONE, TOGETHER)]
    pairs = [(np.array(row["losses"][TOGETHER]), np.array(row["losses"][ALONE])) for row in rows]
    return {
        "samples": samples,
        "tenants": tenants,
        "tokens_per_s": {name: sum(row["tokens"] for row in rows) / sum(own) for name, own in seconds.items()},
        "over": compare(seconds[ALONE], seconds[TOGETHER]),
        "predicted": predicted[0] / predicted[1],
        "apart": max(float((np.abs(one - other) / other).max()) for one, other in pairs),
        "rows": rows,
    }


def _take(job: Any, steps: list[tuple[Any, Batch]]) -> tuple[float, dict[int, float]]:
    """Seconds of some steps, one after the other, and the losses of their tenants. Collective."""
    losses: dict[int, float] = {}
    job.gather(0.0)  # all begin together
    begin = time.perf_counter()
    for plan, batch in steps:
        losses |= trained(job, plan, batch)
    return float(job.gather(time.perf_counter() - begin).max()), losses


def work(asked: argparse.Namespace) -> None:
    with on_rank(asked.layout) as job:
        cases = [measured(job, asked.tenants, samples, asked.steps, asked.longest) for samples in asked.samples]
        result = {"layout": asked.layout, "cases": cases, "host": job.host.describe()}
        is_rank0 = job.is_rank0
    if is_rank0:
        print(json.dumps(result))


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    return started(__file__, 1 if asked.layout == "dp1" else 2)


def table(result: dict[str, Any]) -> Any:
    cells = {
        "tenants x samples": "{tenants} x {samples}",
        "tokens/s together": f"{{tokens_per_s[{TOGETHER}]:,.0f}}",
        "one after another": f"{{tokens_per_s[{ALONE}]:,.0f}}",
        "speedup": "{over[of_totals]:.2f}x",
        "95 %": lambda case: interval(case["over"]),
        "predicted": "{predicted:.2f}x",
        "apart": "{apart:.0e}",
    }
    return columns(f"tenants of {result['layout']}, {result['host']['device']}, measured", result["cases"], cells)


if __name__ == "__main__":
    own = options(__doc__, layout=("dp2", "dp1", "pp2"), samples=[4, 8, 16], tenants=4, steps=20, longest=LONGEST)
    main(own, benchmark, table, work)
