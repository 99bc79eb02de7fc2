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

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from evenload.commands.tables.show import emit, grid
from evenload.core.errors import EvenloadError
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.static_cp import fold_cp
from evenload.plugins.pipeline.baselines import statically_recomputed
from evenload.plugins.pipeline.config import PipelineConfig

sys.path.append(str(Path(__file__).parents[1] / "published"))
from common import Batch
from lengths import K, corpus
from pipelines import Pipeline, fastest, judged, noisy_seconds

SETTING = Pipeline("llama-13b", pp=4, sp=8, cluster="a800")
COUNT = 512
TAIL_FRAC, TAIL_MEDIAN, TAIL_SHAPE = 0.04, 32 * K, 1.0
LARGEST = 128 * K
"""Most tokens of a chunk on all ranks of a stage together."""
NOISE = 0.1
MEANS = ("step_s", "noise", "bubble_frac", "exposed_frac", "recompute_frac", "micro_batches")
MOST = ("peak_bytes", "plan_s", "micro_batch_imbalance")

Row = dict[str, Any]


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
        return lambda batch: timed(chain, batch)

    def static(planner: str, *sizes: int, plugin: str = "pipeline") -> Callable[[Batch], Row]:
        """The fastest of these token caps."""
        chains = [SETTING.chain(plugin, per_rank(size), planner) for size in sizes]
        return lambda batch: fastest([timed(chain, batch) for chain in chains])

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


def timed(chain: PlanChain, batch: Batch) -> Row:
    """A plan, judged, and the seconds of one core that it takes: the least of two."""
    took = []
    for _ in range(2):
        began = time.process_time()
        plan = chain.plan(batch)
        took.append(time.process_time() - began)
    if chain.links[0][0].name == "packing":
        plan = statically_recomputed(plan, chain.context, PipelineConfig())
    row = judged(plan, chain.context)
    row["noise"] = noisy_seconds(plan, chain.context, NOISE) / noisy_seconds(plan, chain.context, 0.0, 1) - 1
    return {**row, "plan_s": min(took), "made_by": plan.made_by, "tokens_at_most": max(plan.slots["F"])}


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


def benchmark(contexts: list[int], seeds: int, file: Path | None, count: int = COUNT) -> Row:
    label, _ = lengths_of(contexts[0], 0, file, count)
    return {
        "predicted": True,
        "lengths": label,
        "sequences": count,
        "contexts": contexts,
        "rows": [row for context in contexts for row in rows_of(context, seeds, file, count)],
    }


def table(result: Row) -> Any:
    ours = {r["context"]: r["step_s"] for r in result["rows"] if r["way"] == "evenload" and "step_s" in r}
    head = (
        "context",
        "way",
        "s a step",
        "over ours",
        "bubble",
        "recomputed",
        "of ideal",
        "peak GB",
        "chunks",
        "max / mean",
        "10 % noise",
    )
    rows: list[tuple[Any, ...]] = []
    for r in result["rows"]:
        name = (f"{r['context'] // K}K", r["way"])
        if "failed" in r:
            rows.append((*name, r["failed"], *[""] * 9))
            continue
        over = r["step_s"] / ours[r["context"]] if r["context"] in ours else float("nan")
        rows.append(
            (
                *name,
                f"{r['step_s']:.2f}",
                f"{over:.3f}",
                f"{r['bubble_frac']:.1%}",
                f"{r['recompute_frac']:.1%}",
                f"{r['of_ideal']:.3f}",
                f"{r['peak_bytes'] / 1e9:.1f}" + ("" if r["fits"] else " (too much)"),
                f"{r['micro_batches']:.0f}",
                f"{r['micro_batch_imbalance']:.2f}",
                f"{r['noise']:+.1%}",
                seconds(r["plan_s"]),
            )
        )
    about = f"{result['sequences']} sequences: {result['lengths']} and 4 % long ones; means of seeds, planning measured"
    return grid("LLaMA 13B, PP 4 x SP 8, A800 (predicted)", (*head, "planning"), rows, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="FlexSP's wikipedia.txt, or any other; default: a stand-in.")
    parser.add_argument("--contexts", default="48,96,192", help="Longest sequences, in 1,024 tokens.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="One context, one seed, 128 sequences.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = parser.parse_args()
    contexts = [K * int(word) for word in arguments.contexts.split(",")]
    if arguments.quick:
        result = benchmark(contexts[:1], 1, arguments.lengths, COUNT // 4)
    else:
        result = benchmark(contexts, arguments.seeds, arguments.lengths)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, arguments.json, table)


if __name__ == "__main__":
    main()
