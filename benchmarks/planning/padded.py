"""Even padded groups next to other people's rules, their certified bound, and in small batches every plan. Predicted.

    python benchmarks/planning/padded.py [--quick] [--json] [--out FILE]

Lengths are lognormal with a median of 148 tokens, cut to 16 .. 1,024 (the law of ODB's authors), cap 2,048, analytic
costs. "In step": all ranks run every pass together (ZeRO 3). Ratios are over evenload's step, the range of three draws;
planning is CPU seconds, the least of them.

    bound      evenload's step over the certified bound
    best       the same over the best of all runs of neighbours, each tried (at most 16 samples)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.benchmarks.chains import chain_of, plugins
from evenload.benchmarks.frame import Row, columns, main, options, timed
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import certified_s, judge
from evenload.plugins.packing.padded import SortedRows

CAP, MOST_TRIED, DRAWS = 2048, 16, 3
CASES = ((2, 14, 3), (4, 14, 3), (2, 192, 3), (4, 64, 3), (8, 512, 3), (16, 4096, 3), (4, 64, 0), (8, 512, 0))
"""Data-parallel ranks, samples, ZeRO stage."""
PEERS = ("group_by_length", "token_budget", "stock")


def padding_chain(ranks: int, zero: int) -> PlanChain:
    return chain_of(
        {
            "trainer": "deepspeed",
            "parallel": {"dp": ranks},
            "deepspeed": {"zero_stage": zero},
            "train": {"global_batch_size": 4096, "micro_batch_size": 4},
            "plugins": plugins(CAP, "packing", padded=True),
        }
    )


def rounds_s(costs: list[float], ranks: int) -> float:
    """Seconds of micro-batches that ranks run in step, the costliest ones at once."""
    return sum(sorted(costs, reverse=True)[::ranks])


def best_s(rows: SortedRows, ranks: int) -> float:
    """The least of all ways to cut the sorted rows into micro-batches under the cap."""

    def cuts(first: int) -> Iterator[list[int]]:
        count = len(rows.tokens)
        if first == count:
            yield [count]
            return
        for stop in range(first + 1, first + int(rows.most[first]) + 1):
            yield from ([first, *rest] for rest in cuts(stop))

    return min(rounds_s([rows.cost(a, b) for a, b in pairwise(stops)], ranks) for stops in cuts(0))


def cost_of(rows: SortedRows, lengths: list[int]) -> float:
    """Seconds of a micro-batch of samples of these lengths."""
    longest = int(np.flatnonzero(rows.tokens == max(lengths))[0])
    return float(rows.seconds[longest]) * len(lengths) + rows.launch_s


def measured(chain: PlanChain, lengths: Lengths) -> Row:
    plan, planning_s = timed(lambda: chain.plan(lengths), 1)
    step_s = judge(plan, chain.context).step_s
    row: Row = {"planning_s": planning_s, "bound": step_s / certified_s(plan, chain.context)}
    for name in PEERS:
        row[name] = judge(chain.baseline(name, lengths), chain.context).step_s / step_s
    rows = SortedRows.of(lengths, chain.caps, chain.context)
    if len(lengths) <= MOST_TRIED and chain.caps.together > 1:
        own = [cost_of(rows, [piece.length for piece in m.slices]) for m in plan.micro_batches if m.slices]
        row["best"] = rounds_s(own, chain.limits.num_ranks) / best_s(rows, chain.limits.num_ranks)
    return row


def row_of(ranks: int, count: int, zero: int, draws: int) -> Row:
    chain, rng = padding_chain(ranks, zero), np.random.default_rng(0)
    drawn = [as_lengths(np.clip(rng.lognormal(5, 1, count), 16, 1024).astype(int)) for _ in range(draws)]
    rows = [measured(chain, lengths) for lengths in drawn]
    joined = {key: [min(row[key] for row in rows), max(row[key] for row in rows)] for key in rows[0]}
    return {"ranks": ranks, "samples": count, "in_step": zero == 3, **joined}


def table(result: Row) -> Any:
    def shown(key: str) -> Any:
        def cell(row: Row) -> str:
            low, high = row.get(key, (None, None))
            return "" if low is None else f"{low:.3f}" + (f" to {high:.3f}" if high - low > 5e-4 else "")

        return cell

    cells = {"ranks, samples": "{ranks} x {samples:,}", "in step": lambda row: "yes" if row["in_step"] else "no"}
    cells |= {key: shown(key) for key in ("bound", "best", *PEERS)}
    cells |= {"planning, s": "{planning_s[0]:.3f}"}
    return columns("Even padded groups (predicted)", result["rows"], cells, f"cap {CAP:,} tokens")


def benchmark(asked: Any) -> Row:
    cases, draws = (CASES[:1] + CASES[6:7], 1) if asked.quick else (CASES, DRAWS)
    return {"predicted": True, "rows": [row_of(*case, draws) for case in cases]}


if __name__ == "__main__":
    main(options(__doc__, quick=False), benchmark, table)
