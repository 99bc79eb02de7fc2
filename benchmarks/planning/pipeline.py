"""Pipelines of chunks: 13B on 4 nodes of 8 A800, PP 4 x SP 8, 512 sequences a step. Predicted; planning measured.

    python benchmarks/planning/pipeline.py [--lengths FILE] [--contexts 48,96,192] [--seeds 3] [--quick] [--json] \\
        [--out FILE]

Lengths: Wikipedia (FlexSP's wikipedia.txt, or a stand-in of its quantiles: published/lengths.py), of which 4 % are
redrawn from a log-normal of median 32K and shape 1, all cut at the context. Costs: counted FLOPs at half of A800's
peak (recipes/clusters/a800.yaml), Ulysses all-to-all inside a node, distributed optimizer; a tenth of 80 GB stays free.

    evenload     the pipeline plugin
    no W         the same without passes for weight gradients (plugins.pipeline.split_backward off)
    algorithm 1  InfiniPipe's: one mesh for all sequences, cut for the longest (arXiv 2509.21275, Alg. 1 and 2)
    fixed        chunks of equally many tokens, short sequences packed into such (Seq1F1B as InfiniPipe compares it,
                 ChunkFlow), one number of recomputed layers for all: the fastest of eight sizes, 1K to 128K
    whole        every sequence a micro-batch, 1F1B, one number of recomputed layers
    packed       whole sequences in the order of the batch, up to the context, likewise
    balanced     whole sequences balanced by cost (`whole` of the packing plugin), likewise: the fastest of caps of 1/4,
                 1/2 and 1 context, the strongest that leaves sequences whole

"of ideal" is the mean stage's compute and exchange alone, nothing launched, recomputed or waited for, over the step;
"10 % noise" by how much longer the passes take to the last one where each is off by a tenth, normally distributed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from evenload.benchmarks.frame import Row, columns, main, options, timed
from evenload.benchmarks.published.common import Batch
from evenload.benchmarks.published.lengths import K, corpus
from evenload.benchmarks.published.pipelines import Pipeline, fastest, judged, noisy_seconds
from evenload.core.errors import EvenloadError
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.static_cp import fold_cp
from evenload.plugins.pipeline.baselines import statically_recomputed
from evenload.plugins.pipeline.config import PipelineConfig

SETTING = Pipeline("llama-13b", pp=4, sp=8, cluster="a800")
COUNT = 512
TAIL_FRAC, TAIL_MEDIAN, TAIL_SHAPE = 0.04, 32 * K, 1.0
LARGEST = 128 * K
"""Most tokens of a chunk on all ranks of a stage together."""
NOISE = 0.1
MEANS = ("step_s", "noise", "bubble_frac", "exposed_frac", "recompute_frac", "micro_batches")
MOST = ("peak_bytes", "plan_s", "micro_batch_imbalance")


def lengths_of(context: int, seed: int, file: Path | None, count: int = COUNT) -> tuple[str, npt.NDArray[np.int64]]:
    """What stood in, and the lengths of a batch."""
    rng = np.random.default_rng(seed)
    label, body = corpus("wikipedia-like", 64 * count, 1 << 30, file)
    lengths = rng.choice(body, count)
    long = rng.random(count) < TAIL_FRAC
    lengths[long] = rng.lognormal(np.log(TAIL_MEDIAN), TAIL_SHAPE, int(long.sum()))
    return label, np.clip(lengths, 2, context)


def per_rank(tokens: int) -> int:
    """Of a stage's tokens."""
    return -(-tokens // SETTING.sp)


def planners(context: int) -> dict[str, Callable[[Batch], Row]]:
    """Every way to run a batch."""

    def planned(planner: str, **words: Any) -> Callable[[Batch], Row]:
        chain = SETTING.chain("pipeline", per_rank(LARGEST), planner, **words)
        return lambda batch: judged_row(chain, batch)

    def static(planner: str, *sizes: int, plugin: str = "pipeline") -> Callable[[Batch], Row]:
        """The fastest of these token caps."""
        chains = [SETTING.chain(plugin, per_rank(size), planner) for size in sizes]
        return lambda batch: fastest([judged_row(chain, batch) for chain in chains])

    return {
        "evenload": planned(""),
        "no W": planned("", split_backward="off"),
        "algorithm 1": planned("algorithm_1"),
        "fixed": static("fixed_chunks", LARGEST, LARGEST // 16),
        "whole": static("whole_1f1b", context),
        "packed": static("in_order", context),
        "balanced": static("whole", context, context // 2, context // 4, plugin="packing"),
    }


def ideal_seconds(batch: Batch) -> float:
    """Compute and exchange of the mean stage."""
    chain = SETTING.chain("pipeline", per_rank(LARGEST))
    _, of_lane = fold_cp(chain.limits, chain.context)
    return float(of_lane.costs.sequence_s(batch).sum())


def judged_row(chain: PlanChain, batch: Batch) -> Row:
    """A plan, judged, and the seconds of one core that it takes."""
    plan, plan_s = timed(lambda: chain.plan(batch), 2)
    if chain.links[0][0].name == "packing":
        plan = statically_recomputed(plan, chain.context, PipelineConfig())
    row = judged(plan, chain.context)
    row["noise"] = noisy_seconds(plan, chain.context, NOISE) / noisy_seconds(plan, chain.context, 0.0, 1) - 1
    return {**row, "plan_s": plan_s, "made_by": plan.made_by, "tokens_at_most": max(plan.slots["F"])}


def rows_of(context: int, seeds: int, file: Path | None, count: int) -> Iterator[Row]:
    """A row for each way: means over the seeds; peak, planning and imbalance are the largest of them."""
    drawn = [lengths_of(context, seed, file, count) for seed in range(seeds)]
    batches = [as_lengths(lengths) for _, lengths in drawn]
    ideal_s = statistics.mean(ideal_seconds(batch) for batch in batches)
    for name, plan_batch in planners(context).items():
        try:
            rows = [plan_batch(batch) for batch in batches]
        except EvenloadError as error:
            yield {"context": context, "way": name, "failed": str(error)}
            continue
        means = {key: statistics.mean(one[key] for one in rows) for key in MEANS}
        most = {key: max(one[key] for one in rows) for key in MOST}
        yield {
            "context": context,
            "way": name,
            **means,
            **most,
            "of_ideal": ideal_s / means["step_s"],
            "fits": all(one["fits"] for one in rows),
            "seeds": rows,
        }


def benchmark(asked: Any) -> Row:
    contexts, seeds, count = [K * context for context in asked.contexts], asked.seeds, COUNT
    if asked.quick:
        contexts, seeds, count = contexts[:1], 1, COUNT // 4
    label, _ = lengths_of(contexts[0], 0, asked.lengths, count)
    return {
        "predicted": True,
        "lengths": label,
        "sequences": count,
        "contexts": contexts,
        "rows": [row for context in contexts for row in rows_of(context, seeds, asked.lengths, count)],
    }


def table(result: Row) -> Any:
    ours = {r["context"]: r["step_s"] for r in result["rows"] if r["way"] == "evenload" and "step_s" in r}

    def unless_failed(template: str) -> Any:
        return lambda row: "" if "failed" in row else template.format(**row, over=over(row))

    def over(row: Row) -> float:
        return row["step_s"] / ours.get(row["context"], float("nan"))

    cells = {
        "context": lambda row: f"{row['context'] // K}K",
        "way": "{way}",
        "s a step": lambda row: row.get("failed") or f"{row['step_s']:.2f}",
        "over ours": unless_failed("{over:.3f}"),
        "bubble": unless_failed("{bubble_frac:.1%}"),
        "recomputed": unless_failed("{recompute_frac:.1%}"),
        "of ideal": unless_failed("{of_ideal:.3f}"),
        "peak GB": lambda row: "" if "failed" in row else f"{row['peak_bytes'] / 1e9:.1f}{'' if row['fits'] else '!'}",
        "chunks": unless_failed("{micro_batches:.0f}"),
        "max / mean": unless_failed("{micro_batch_imbalance:.2f}"),
        "10 % noise": unless_failed("{noise:+.1%}"),
        "planning": lambda row: "" if "failed" in row else seconds(row["plan_s"]),
    }
    about = (
        f"{result['sequences']} sequences: {result['lengths']} and 4 % long ones; means of seeds, planning measured; "
    )
    return columns("LLaMA 13B, PP 4 x SP 8, A800 (predicted)", result["rows"], cells, about + "!: too much")


if __name__ == "__main__":
    main(options(__doc__, lengths=Path, contexts=[48, 96, 192], seeds=3, quick=False), benchmark, table)
