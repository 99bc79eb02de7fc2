"""What a mixture costs over one source: its draws, and the losses of its domains in a step. Measured.

    python benchmarks/training/mixture.py [--recipe mixture] [--ranks 2] [--steps 12] [key=value ...] [--json]
                                          [--out FILE]

draw     CPU us a sample of batches of 512, of so many domains of a million samples each, and of one order without any
losses   CPU seconds of a step, of all ranks together, with the losses of sequences taken down and without, on the same
         plans of the same batches, in turn; the median of the steps' ratios with its 95 % interval. Waiting is none.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from evenload.benchmarks.frame import main, on_job, options, started
from evenload.commands.tables.show import grid
from evenload.core.input.format import seconds

DOMAINS, SAMPLES, BATCH, BATCHES = (1, 4, 16, 64), 10**6, 512, 40


def drawn() -> list[dict[str, Any]]:
    """A row for one order, and for mixtures of it."""
    from evenload.core.recipe.shares import normalised
    from evenload.data.samples.mixture import Mixture
    from evenload.data.samples.order import BatchSize, SampleOrder

    lengths = np.full(SAMPLES, 100)
    order, begin = SampleOrder(SAMPLES, 1), time.process_time()
    for _ in range(BATCHES):
        _, order = BatchSize(BATCH).take(order, lengths)
    rows = [{"domains": 0, "us": (time.process_time() - begin) / BATCHES / BATCH * 1e6}]
    for count in DOMAINS:
        names = {f"domain-{number:02}": lengths for number in range(count)}
        shares = normalised([1 + number % 7 for number in range(count)])
        mixture = Mixture(names, None, BatchSize(BATCH), lambda state, step, shares=shares: shares)
        state = mixture.take(mixture.begin(1))[1]
        begin = time.process_time()
        for _ in range(BATCHES):
            _, state = mixture.take(state)
        rows.append({"domains": count, "us": (time.process_time() - begin) / BATCHES / BATCH * 1e6})
    return rows


def measured(job: Any, steps: int) -> list[dict[str, float]]:
    """CPU seconds of all ranks of every step, with and without the losses of sequences. Collective."""
    from evenload.core.plan.step_plan import as_lengths
    from evenload.training.measuring import in_turn

    drawing, rows = job.drawing(), []
    for number in range(steps + 1):
        draw = drawing()
        plan = job.chain.plan(as_lengths(draw.lengths))
        row = {}
        for name in in_turn(["without", "with"], number):
            job.gather(0.0)
            begin = time.process_time()
            job.host.scores_steps = name == "with"
            job.host.train_step(plan, job.tokens_of(draw), lr=1e-4, labels=job.labels_of(draw))
            row[name] = float(job.gather(time.process_time() - begin).sum())
        rows.append(row)
    return rows[1:]  # the first one warms up


def on_rank(asked: argparse.Namespace) -> None:
    from evenload.training.measuring import compare

    def work(job: Any) -> dict[str, Any]:
        rows = measured(job, asked.steps)
        means = {name: float(np.median([row[name] for row in rows])) for name in ("with", "without")}
        over = compare([row["with"] for row in rows], [row["without"] for row in rows])
        return {"step_s": means, "over": over, "rows": rows, "host": job.host.describe()}

    on_job(asked.recipe, asked.settings, work)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """The drawing in this process, then the steps on ranks of their own."""
    return {"draw": drawn(), "losses": started(__file__, asked.ranks)}


def table(result: dict[str, Any]) -> Any:
    losses, over = result["losses"], result["losses"]["over"]
    rows = [(f"{row['domains'] or 'none: one order'}", f"{row['us']:.2f} us") for row in result["draw"]]
    interval = "too few steps" if over["interval"] is None else "{:.3f} to {:.3f}".format(*over["interval"])
    caption = (
        f"a step takes {seconds(losses['step_s']['without'])} of CPU, with the losses of domains "
        f"{seconds(losses['step_s']['with'])}: {over['of_totals']:.3f} times as much ({interval})"
    )
    return grid("domains", ("domains", "a sample"), rows, caption)


if __name__ == "__main__":
    main(options(__doc__, settings=..., recipe="mixture", ranks=2, steps=12), benchmark, table, on_rank)
