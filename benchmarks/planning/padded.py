"""Even padded groups beside other people's rules, their certified bound, and in small batches every plan. Predicted.

    python benchmarks/planning/padded.py [--quick] [--json] [--out FILE]

Lengths are lognormal with a median of 148 tokens, cut to 16 .. 1,024 (the law of ODB's authors), cap 2,048, analytic
costs. "In step": all ranks run every pass together (ZeRO 3). Ratios are over evenload's step, the range of three draws;
planning is CPU seconds, the least of them.

    bound      evenload's step over the certified bound
    best       the same over the best of all runs of neighbours, each tried (at most 16 samples)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import to_json
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import certified_s, judge
from evenload.core.recipe.recipe import parse
from evenload.plugins.packing.padded import SortedRows

CAP, MOST_TRIED, DRAWS = 2048, 16, 3
CASES = ((2, 14, 3), (4, 14, 3), (2, 192, 3), (4, 64, 3), (8, 512, 3), (16, 4096, 3), (4, 64, 0), (8, 512, 0))
"""Data-parallel ranks, samples, ZeRO stage."""
PEERS = ("group_by_length", "token_budget", "stock")
Row = dict[str, Any]


def chain_of(ranks: int, zero: int) -> PlanChain:
    recipe = {
        "trainer": "deepspeed",
        "parallel": {"dp": ranks},
        "deepspeed": {"zero_stage": zero},
        "train": {"global_batch_size": 4096, "micro_batch_size": 4},
        "plugins": {"packing": {"enabled": True, "max_tokens": CAP, "padded": True}},
    }
    parsed = parse(recipe)
    return PlanChain.of_recipe(parsed, parsed.layout())


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
    began_s = time.process_time()
    plan = chain.plan(lengths)
    planning_s = time.process_time() - began_s
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
    chain, rng = chain_of(ranks, zero), np.random.default_rng(0)
    drawn = [as_lengths(np.clip(rng.lognormal(5, 1, count), 16, 1024).astype(int)) for _ in range(draws)]
    rows = [measured(chain, lengths) for lengths in drawn]
    joined = {key: [min(row[key] for row in rows), max(row[key] for row in rows)] for key in rows[0]}
    return {"ranks": ranks, "samples": count, "in_step": zero == 3, **joined}


def table(result: Row) -> Any:
    def shown(row: Row, key: str) -> str:
        low, high = row.get(key, (None, None))
        return "" if low is None else f"{low:.3f}" + (f" to {high:.3f}" if high - low > 5e-4 else "")

    head = ("ranks, samples", "in step", "bound", "best", *PEERS, "planning, s")
    lines = [
        (
            f"{row['ranks']} x {row['samples']:,}",
            "yes" if row["in_step"] else "no",
            *(shown(row, key) for key in ("bound", "best", *PEERS)),
            f"{row['planning_s'][0]:.3f}",
        )
        for row in result["rows"]
    ]
    return grid("Even padded groups (predicted)", head, lines, f"cap {CAP:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Two small cases, one draw.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load_plugins()
    cases, draws = (CASES[:1] + CASES[6:7], 1) if options.quick else (CASES, DRAWS)
    result = {"predicted": True, "rows": [row_of(*case, draws) for case in cases]}
    if options.out:
        options.out.write_text(to_json(result))
    emit(result, options.json, table)


if __name__ == "__main__":
    main()
