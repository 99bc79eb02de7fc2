"""Halves of micro-batches that take turns: what evenload's plans gain, and the traffic there is. All predicted.

    python benchmarks/peers/halves.py [--lengths FILE] [--batches 2] [--json] [--out FILE]

DistCA (arXiv 2510.18121) runs two halves of a micro-batch in turn: while one half's activations travel (reductions of
tensor parallelism, keys and values, heads), the other half is computed. Each row: evenload's plan with packing and mesh
as they are, and with ``plugins.mesh.halves=auto``; *open* is traffic that nothing hides, as a share of all ranks' time,
gradient sum included; *halved* the micro-batches that the planner took as halves, *cut* those with a sequence in both.
Traffic takes 15 % of a device from compute beside it (`core.costs.exposed.BESIDE`, an assumption) and every half pays
a launch. Lengths as in `peers/mesh.py`; the longest is cut at the context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from evenload.api import load_plugins
from evenload.benchmarks.chains import batches, chain_of
from evenload.benchmarks.frame import Row, main, means, options, timed
from evenload.benchmarks.peers.shared import sets_of
from evenload.benchmarks.published import common
from evenload.commands.tables.show import grid
from evenload.core.costs.exposed import BESIDE
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import Lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.data.samples.cut import cut

MODELS = {
    **common.MODELS,
    "llama-34b": {
        "num_layers": 48,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "ffn_hidden_size": 22016,
    },
}
K = 1024


class Case(NamedTuple):
    """A model on H200s, TP inside a node; contexts in tokens."""

    model: str
    dp: int
    tp: int
    samples: int
    context: int


CASES = (
    Case("llama-7b", 64, 1, 512, 128 * K),
    Case("llama-13b", 16, 8, 128, 128 * K),
    Case("llama-34b", 16, 8, 128, 128 * K),
    Case("llama-34b", 16, 8, 64, 512 * K),
)


def halved_chain(case: Case, halves: str) -> PlanChain:
    packing = {"enabled": True, "max_tokens": 32 * K}
    return chain_of(
        {
            "model": {"vocab_size": 32000, **MODELS[case.model]},
            "parallel": {"dp": case.dp, "tp": case.tp},
            "train": {"dtype": "bf16", "global_batch_size": case.samples},
            "data": {"max_length": case.context},
            "cluster": "h200",
            "plugins": {"packing": packing, "mesh": {**packing, "halves": halves}},
        }
    )


def row_of(case: Case, name: str, lengths: Lengths, batches_wanted: int) -> Row:
    plain, turning, rows = halved_chain(case, "off"), halved_chain(case, "auto"), []
    for batch in batches(cut(lengths, case.context, "split", 2).length, case.samples, batches_wanted):
        row: Row = {}
        for key, chain in (("", plain), ("halves_", turning)):
            plan, row[f"{key}plan_s"] = timed(lambda chain=chain, batch=batch: chain.plan(batch), 2)
            outcome = outcome_of(plan, chain.context)
            row |= {f"{key}step_s": outcome.step_s, f"{key}open_frac": outcome.exposed_frac}
        halved = [m for m in plan.micro_batches if m.first_half]
        both = sum(len({s.sequence for s in m.slices}) < len(m.slices) for m in halved)
        rows.append(
            {**row, "halved_frac": len(halved) / len(plan.micro_batches), "cut_frac": both / max(1, len(halved))}
        )
    row = means(rows)
    return {**case._asdict(), "lengths": name, **row, "gain": 1 - row["halves_step_s"] / row["step_s"]}


def benchmark(words: Any) -> Row:
    load_plugins()
    sets = sets_of(words.lengths).items()
    rows = [row_of(case, name, lengths, words.batches) for name, lengths in sets for case in CASES]
    return {"predicted": True, "beside": BESIDE, "batches": words.batches, "rows": rows}


def table(result: Row) -> Any:
    """A line a case and set."""
    lines = [
        (
            f"{row['model']}, DP {row['dp']} x TP {row['tp']}",
            f"{row['lengths']}, {row['samples']} to {row['context'] // K}K",
            seconds(row["step_s"]),
            f"{row['open_frac']:.1%}",
            seconds(row["halves_step_s"]),
            f"{row['halves_open_frac']:.1%}",
            f"{row['gain']:.1%}",
            f"{row['halved_frac']:.0%}",
            f"{row['cut_frac']:.0%}",
            f"{seconds(row['plan_s'])}, {seconds(row['halves_plan_s'])}",
        )
        for row in result["rows"]
    ]
    head = ("layout", "samples", "step", "open", "in turns", "open", "saved", "halved", "cut", "planning, both")
    caption = f"predicted; traffic takes {result['beside']:.0%} of a device from compute beside it"
    return grid("halves of micro-batches that take turns", head, lines, caption)


if __name__ == "__main__":
    main(options(__doc__, lengths=[], batches=2), benchmark, table)
