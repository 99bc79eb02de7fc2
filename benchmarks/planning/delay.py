"""What outlier delay gains and how late it trains tokens, against WLB-LLM's queues by length. All is predicted.

    python benchmarks/planning/delay.py --lengths FILE [--max-lengths 262144,65536] [--size 512] [--ranks 64] \\
        [--delays 1,2,4,8]
                               [--json] [--out FILE]

Every global batch of the file is drawn as training would draw it; longer samples are split. Cost of a sequence of s
tokens: 24576 s + s^2, a 7B model's (verl, utils/seqlen_balancing.py). The busiest rank of a step takes the larger of
the costliest sequence and the mean share: the bound that packing comes within 1 % of. "step / ideal" sums it over all
steps and divides by the sum of the mean shares, so 1 is even; "late" is how many steps tokens waited on average.

    one queue        evenload (plugins/packing/delay.py)
    mean share       those above the mean share of all wait until one is due or there are as many as ranks
    queues of A, B   WLB-LLM, arXiv 2503.17924: a queue for each range of lengths from A on, B on, ..., let go when it
                     holds as many as ranks or its oldest is due
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from evenload.benchmarks.chains import SEED, chain_of
from evenload.benchmarks.frame import main, options
from evenload.commands.tables.show import grid
from evenload.core.costs.costs import from_totals
from evenload.core.planning.chain import PlanChain
from evenload.core.registry import HoldBack
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import BatchSize
from evenload.plugins.packing.delay import outliers
from evenload.training.drawing import Drawing, num_waiting

COSTS = from_totals("verl, utils/seqlen_balancing.py, 7B", token_s=24576.0, square_s=1.0)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Rule = Callable[[Ints, Ints, int, int], Bools]
"""(lengths, steps waited, ranks, most steps) -> which wait."""


def one_queue(lengths: Ints, waited: Ints, ranks: int, most: int) -> Bools:
    return outliers(COSTS.sequence_s(lengths), waited, ranks, most)


def mean_share(lengths: Ints, waited: Ints, ranks: int, most: int) -> Bools:
    costs = COSTS.sequence_s(lengths)
    return _let_go(costs > costs.sum() / ranks, waited, ranks, most)


def queues(*thresholds: int) -> Rule:
    def rule(lengths: Ints, waited: Ints, ranks: int, most: int) -> Bools:
        waits = np.zeros(len(lengths), dtype=np.bool_)
        for low, high in pairwise((*thresholds, np.iinfo(np.int64).max)):
            waits |= _let_go((lengths >= low) & (lengths < high), waited, ranks, most)
        return waits

    return rule


def _let_go(queue: Bools, waited: Ints, ranks: int, most: int) -> Bools:
    """The queue, or nobody if it holds as many as ranks or one is due."""
    full = int(queue.sum()) >= ranks or bool((waited[queue] >= most).any())
    return np.zeros_like(queue) if full else queue


RULES: dict[str, Rule] = {
    "one queue": one_queue,
    "mean share": mean_share,
    "queues of 8K": queues(8192),
    "queues of 16K": queues(16384),
    "queues of 8K, 32K": queues(8192, 32768),
    "queues of 16K, 64K": queues(16384, 65536),
    "queues of 8K, 24K, 72K": queues(8192, 24576, 73728),
}


def chain_with(rule: Rule, ranks: int, most: int) -> PlanChain:
    """The packing chain with another rule; ``most`` 0 holds nothing back."""
    chain = chain_of({"parallel": {"dp": ranks}, "plugins": {"packing": {"enabled": True}}})

    def hold_back(_: Any) -> HoldBack | None:
        return (lambda lengths, waited, ranks, context: rule(lengths, waited, ranks, most)) if most else None

    ((plugin, config),) = chain.links
    return replace(chain, links=((replace(plugin, hold_back=hold_back), config),))


def measure(lengths: Ints, size: int, ranks: int, rule: Rule, most: int) -> dict[str, Any]:
    """Drawing once through the lengths. Raises ZeroDivisionError for fewer than one batch."""
    draw = Drawing(None, lengths, BatchSize(size), chain_with(rule, ranks, most), seed=SEED)
    busiest = ideal = late = tokens = 0.0
    longest_queue = 0
    for _ in range(len(lengths) // size):
        got = draw()
        costs = COSTS.sequence_s(got.lengths)
        busiest += max(float(costs.max()), float(costs.sum()) / ranks)
        ideal += float(costs.sum()) / ranks
        late += got.delay_steps * float(got.lengths.sum())
        tokens += float(got.lengths.sum())
        longest_queue = max(longest_queue, num_waiting(got.state))
    return {"step_over_ideal": busiest / ideal, "delay_steps": late / tokens, "longest_queue": longest_queue}


def benchmark(asked: Any) -> dict[str, Any]:
    """All rules, context lengths and delays. Raises EvenloadError for a file that holds no lengths."""
    raw, size, ranks = read_lengths(asked.lengths), asked.size, asked.ranks

    def rows() -> Iterator[dict[str, Any]]:
        for max_length in asked.max_lengths:
            lengths = cut(raw, max_length, "split", 2).length
            about = {"max_length": max_length, "steps": len(lengths) // size}
            yield about | {"rule": "off", "max_delay_steps": 0, **measure(lengths, size, ranks, one_queue, 0)}
            for name, rule in RULES.items():
                for most in asked.delays:
                    measured = measure(lengths, size, ranks, rule, most)
                    yield about | {"rule": name, "max_delay_steps": most, **measured}

    return {"predicted": True, "lengths": asked.lengths.name, "size": size, "ranks": ranks, "rows": list(rows())}


def table(result: dict[str, Any]) -> Any:
    """A line for each context length and rule; a cell for each delay."""
    delays = sorted({r["max_delay_steps"] for r in result["rows"]} - {0})
    by_setting = {(r["max_length"], r["rule"], r["max_delay_steps"]): r for r in result["rows"]}

    def cell(key: tuple[int, str, int]) -> str:
        row = by_setting[key]
        return f"{row['step_over_ideal']:.2f} ({row['delay_steps']:.2f} late)"

    lines = []
    for max_length in sorted({r["max_length"] for r in result["rows"]}, reverse=True):
        off = f"{by_setting[max_length, 'off', 0]['step_over_ideal']:.2f}"
        lines += [
            (f"{max_length // 1024}K", name, off, *(cell((max_length, name, most)) for most in delays))
            for name in RULES
        ]
    head = ("context", "rule", "off", *(f"at most {most} steps" for most in delays))
    about = f"{result['size']} sequences a step on {result['ranks']} ranks"
    caption = "busiest rank over ideal, all steps summed; steps by which tokens are late on average; all predicted"
    return grid(f"outlier delay on {result['lengths']}, {about}", head, lines, caption)


if __name__ == "__main__":
    asked = options(__doc__, max_lengths=[262144, 65536], size=512, ranks=64, delays=[1, 2, 4, 8])
    asked.add_argument("--lengths", type=Path, required=True, help=".npy, .txt, .jsonl or Megatron .idx")
    main(asked, benchmark, table)
