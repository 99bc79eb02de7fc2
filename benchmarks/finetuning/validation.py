"""Planned validation against padded batches of 8 samples on the same host, alternating: measured.

    python benchmarks/finetuning/validation.py [--recipe quickstart] [--ranks 2] [--batches 6] [--repeats 2] \\
        [key=value ...] [--json] [--out FILE]

Every batch is scored by each variant in turn (`Host.score`): the same weights, the same host, forwards alone.

    padded    as trainers evaluate: 8 samples in their order, padded to the longest of them
    sorted    the batch's samples sorted by length first, so that 8 of about one length are padded together
    evenload  the recipe's planners, for forwards alone (`core.planning.forward_only`)

Seconds are those of the slowest rank by the wall clock. Ratios are of the tokens a second of evenload over those of the
variant on the same batch: their median, and its 95 % interval. ``apart``: the largest relative difference of a
sequence's loss from evenload's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from evenload.benchmarks.frame import columns, described, interval, main, on_job, options, started

SAMPLES = 8
OURS = "evenload"


def plans_of(chain: Any, lengths: Any) -> dict[str, Any]:
    """By variant the plan of a batch."""
    from evenload.core.laws import check
    from evenload.core.plan.rounds import in_rounds
    from evenload.core.planning.stock import stock_plan

    padded = stock_plan(lengths, chain.limits, SAMPLES)
    return {
        "padded": check(in_rounds(padded)),
        "sorted": check(in_rounds(in_order_of(np.argsort(-lengths, kind="stable"), lengths, chain.limits))),
        OURS: chain.plan(lengths),
    }


def in_order_of(order: Any, lengths: Any, limits: Any) -> Any:
    """The padded plan of samples in another order, by their own numbers."""
    from evenload.core.plan.step_plan import as_lengths
    from evenload.core.planning.stock import stock_plan

    plan = stock_plan(as_lengths(lengths[order]), limits, SAMPLES)
    numbered = tuple(
        m._replace(slices=tuple(s._replace(sequence=int(order[s.sequence])) for s in m.slices))
        for m in plan.micro_batches
    )
    return plan.revised(lengths=lengths, micro_batches=numbered)


def measured(job: Any, batches: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each batch and variant. Collective."""
    from evenload.core.plan.step_plan import as_lengths
    from evenload.core.planning.forward_only import forward_only
    from evenload.training.measuring import in_turn

    drawing, chain, rows = job.drawing(), forward_only(job.chain), []
    for number in range(batches + 1):
        draw = drawing()
        plans = plans_of(chain, as_lengths(draw.lengths))
        for turn in range(repeats if number else 1):
            losses: dict[str, Any] = {}
            took: dict[str, float] = {}
            for name in in_turn(list(plans), number + turn):
                job.gather(0.0)  # all begin together
                begin = time.perf_counter()
                losses[name] = score(job, plans[name], draw, number).losses
                took[name] = float(job.gather(time.perf_counter() - begin).max())
            for name in plans if number else ():  # the first batch warms up
                apart = float((np.abs(losses[name] - losses[OURS]) / losses[OURS]).max())
                row = {"batch": number, "variant": name, "seconds": took[name], "tokens": int(draw.lengths.sum())}
                rows.append({**row, "computed": plans[name].num_padded_tokens, "apart": apart})
    return rows


def score(job: Any, plan: Any, draw: Any, number: int) -> Any:
    """The losses of a batch. Collective."""
    mark = lambda where: job.watchdog.at(where, number)  # noqa: E731
    return job.host.score(plan, job.tokens_of(draw), labels=job.labels_of(draw), mark=mark)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows come to, by variant."""
    from evenload.training.measuring import compare

    own = [row["seconds"] for row in rows if row["variant"] == OURS]
    result = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        of_name = [row for row in rows if row["variant"] == name]
        result[name] = {
            "tokens_per_s": sum(row["tokens"] for row in of_name) / sum(row["seconds"] for row in of_name),
            "seconds": float(np.median([row["seconds"] for row in of_name])),
            "padding_frac": 1 - sum(row["tokens"] for row in of_name) / sum(row["computed"] for row in of_name),
            "apart": max(row["apart"] for row in of_name),
            "over": compare([row["seconds"] for row in of_name], own),
        }
    return result


def on_rank(asked: argparse.Namespace) -> None:
    def work(job: Any) -> dict[str, Any]:
        rows = measured(job, asked.batches, asked.repeats)
        return {"variants": summary(rows), "rows": rows, **described(job)}

    on_job(asked.recipe, asked.settings, work)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    return started(__file__, asked.ranks)


def table(result: dict[str, Any]) -> Any:
    cells = {
        "": "{name}",
        "tokens/s": lambda row: row["tokens_per_s"],
        "a batch": "{seconds:seconds}",
        "padding": lambda row: f"{100 * row['padding_frac']:.0f} %",
        "speedup": lambda row: "" if row["name"] == OURS else f"{row['over']['of_totals']:.2f}x",
        "95 %": lambda row: "" if row["name"] == OURS else interval(row["over"]),
        "losses apart": "{apart:.0e}",
    }
    rows = [{"name": name, **row} for name, row in result["variants"].items()]
    host = result["host"]
    return columns(f"validation under {host['trainer']}, {host['device']}, measured", rows, cells)


if __name__ == "__main__":
    own = options(__doc__, recipe="quickstart", ranks=2, batches=6, repeats=2, settings=...)
    main(own, benchmark, table, on_rank)
