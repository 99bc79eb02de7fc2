"""Dealing sequences to replicas of unlike shapes, and which replicas a number of ranks is divided into; predicted.

    python benchmarks/planning/dealing.py [--draws 5] [--quick] [--json] [--out FILE]

Sequences of Wikipedia's quantiles up to 16K, in LobRA's buckets of least padding or as they are. Replicas of one
to four shapes, TP 1 to 8 of a frozen 7B on links of 25 GB/s, which hold 3K, 6K, 16K and 16K tokens:
counted FLOPs, no launches. "over bound" is the end of the last replica over that of the linear program over fractions,
the mean and the worst of the draws:

    ours            `core.balance.replicas`
    longest first   each to the replica that ends first with it (Graham)
    GROUP           LobRA's rule without balancing: each to the least shape that holds it, evenly among its replicas

Rows of `deploy` say how long the choice of replicas for so many ranks takes, of TP 1 to 8 x PP 1 to 8, and its end
over the floor of all choices. CPU seconds of one process.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import Row, columns, machine, main, options, timed
from evenload.benchmarks.published.lengths import drawn, into_buckets
from evenload.core.aliases import Floats, Ints
from evenload.core.balance.deployment import ReplicaKind, deploy
from evenload.core.balance.replicas import bound_of, deal

LONGEST = 16384
HOLDS = {1: 3072, 2: 6144, 4: LONGEST, 8: LONGEST}
"""Tokens that a replica holds, by TP."""
FULL = np.array([3072])
"""A micro-batch that fills a pipeline."""
HIDDEN, LAYERS, FFN, RATE, LINK = 4096, 32, 11008, 1.56e14, 2.5e10


class Setting(NamedTuple):
    """A row: replicas of TP 1, 2, 4 and 8, LobRA's buckets (0: none), sequences."""

    replicas: tuple[int, ...]
    buckets: int
    sequences: int

    def __str__(self) -> str:
        return f"{len(self.replicas)} shapes, {self.buckets or 'no'} buckets, {self.sequences:,} sequences"


SETTINGS = (
    Setting((4, 2, 2), 7, 512),
    Setting((4, 2, 2), 16, 2048),
    Setting((2, 1, 1, 1), 7, 512),
    Setting((2, 1, 1, 1), 16, 512),
    Setting((2, 1, 1, 1), 16, 2048),
    Setting((2, 1, 1, 1), 16, 8192),
)
"""Those of the first reading of LobRA, whose replicas are guessed."""
LARGE = (Setting((2, 1, 1, 1), 0, 512), Setting((256, 128, 64, 32), 16, 8192), Setting((256, 128, 128), 0, 8192))


def lengths_of(count: int, seed: int) -> Ints:
    """Lengths with at least one of the longest."""
    lengths = drawn("wikipedia-like", 2 * count, seed)
    lengths = lengths[lengths <= LONGEST][:count]
    lengths[0] = LONGEST
    return lengths


def kind_s(lengths: Ints, tp: int, pp: int = 1) -> Floats:
    """Seconds of sequences on TP x PP ranks, infinite where they do not fit: a frozen base, forward and backward."""
    n, ranks = lengths.astype(np.float64), tp * pp
    linear = 4 * LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) / (ranks * RATE)
    pair = 14 * LAYERS * HIDDEN / (ranks * RATE)
    moved = 16 * LAYERS / pp * HIDDEN * (tp - 1) / tp / LINK
    return np.where(lengths <= HOLDS[tp] * pp, (linear + moved) * n + 0.5 * pair * n * n, np.inf)


def seconds_of(setting: Setting, seed: int) -> tuple[Floats, Floats, Ints]:
    """What `deal` takes for a setting."""
    lengths = lengths_of(setting.sequences, seed)
    lengths = into_buckets(lengths, setting.buckets) if setting.buckets else lengths
    degrees = [1 << power for power in range(len(setting.replicas))]
    seconds = np.stack([kind_s(lengths, tp) for tp in degrees], axis=1)
    return seconds, np.zeros(len(degrees)), np.repeat(np.arange(len(degrees)), setting.replicas)


def longest_first(seconds: Floats, kind_of: Ints) -> float:
    ends = np.zeros(len(kind_of))
    for row in seconds[np.argsort(-seconds.min(axis=1), kind="stable")]:
        after = ends + row[kind_of]
        ends[after.argmin()] = after.min()
    return float(ends.max())


def group(seconds: Floats, kind_of: Ints) -> float:
    least = np.isfinite(seconds).argmax(axis=1)
    own_s = seconds[np.arange(len(seconds)), least]
    return float((np.bincount(least, own_s, seconds.shape[1]) / np.bincount(kind_of)).max())


def dealing_row(setting: Setting, draws: int) -> Row:
    over: dict[str, list[float]] = {"ours": [], "longest first": [], "GROUP": []}
    cpu_s = 0.0
    for seed in range(draws):
        seconds, fixed_s, kind_of = seconds_of(setting, seed)
        dealt, taken_s = timed(partial(deal, seconds, fixed_s, kind_of), 1)
        bound_s, cpu_s = bound_of(seconds, fixed_s, np.bincount(kind_of)), max(cpu_s, taken_s)
        ends = {"ours": dealt.step_s, "GROUP": group(seconds, kind_of)}
        ends["longest first"] = longest_first(seconds, kind_of)
        for name, end_s in ends.items():
            over[name].append(end_s / bound_s)
    figures = {name: {"mean": float(np.mean(some)), "worst": max(some)} for name, some in over.items()}
    return {"setting": str(setting), "over_bound": figures, "cpu_s": cpu_s}


def deploying_row(ranks: int, sequences: int) -> Row:
    lengths, powers = lengths_of(sequences, 0), (1, 2, 4, 8)
    kinds = [
        ReplicaKind(f"TP{tp} PP{pp}", tp * pp, kind_s(lengths, tp, pp), (pp - 1) * float(kind_s(FULL, tp, pp)[0]))
        for tp in powers for pp in powers
    ]  # fmt: skip
    deployed, cpu_s = timed(lambda: deploy(kinds, [ranks]), 1)
    over = deployed.dealt.step_s / deployed.floor_s
    chosen = ", ".join(f"{count} x {kind.shape}" for count, kind in zip(deployed.counts, kinds, strict=True) if count)
    figures = {"ours": {"mean": over, "worst": over}}
    return {"setting": f"deploy {ranks}: {chosen}", "over_bound": figures, "cpu_s": cpu_s}


def benchmark(asked: Namespace) -> Row:
    draws, settings = (1, SETTINGS[:1]) if asked.quick else (asked.draws, (*SETTINGS, *LARGE))
    rows = [dealing_row(setting, draws) for setting in settings]
    rows += [deploying_row(ranks, 1024) for ranks in ((8,) if asked.quick else (16, 64))]
    return {"predicted": True, "machine": machine(), "draws": draws, "rows": rows}


def table(result: Row) -> Any:
    def over(name: str) -> Any:
        def cell(row: Row) -> str:
            figures = row["over_bound"].get(name)
            return f"{figures['mean']:.3f} ({figures['worst']:.3f})" if figures else ""

        return cell

    cells: dict[str, Any] = {
        "setting": "{setting}",
        **{name: over(name) for name in ("ours", "longest first", "GROUP")},
    }
    cells["CPU s"] = "{cpu_s:.2f}"
    return columns(
        "end of the last replica over the bound, predicted: mean (worst)", result["rows"], cells, result["machine"]
    )


if __name__ == "__main__":
    main(options(__doc__, draws=5, quick=False), benchmark, table)
