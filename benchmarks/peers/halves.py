"""Traffic that nothing hides, and what halves of a micro-batch that take turns would hide of it. All predicted.

    python benchmarks/peers/halves.py [--lengths FILE] [--contention 15] [--batches 2] [--json] [--out FILE]

DistCA (arXiv 2510.18121) runs two halves of a micro-batch in turn: while one half's activations travel (reductions of
tensor parallelism, keys and values, heads), the other half is computed. Not built here; this is what it would give to
evenload's own plans (packing, mesh, and pipeline where there are stages) if each pass of compute c, launch l and open
traffic e, over 2 points of travel a layer and L layers, were

    2 l + max(c + contention * min(c, e), e) + min(c, e) / (2 L)

``contention``: percent of the device that traffic takes from compute meanwhile (an assumption: 16 to 20 of 132 SMs).
The last term is the first travel of a half, which nothing is beside. A step is the busiest rank's passes in place of
what they are, waits between stages and what comes after the passes as they are. Lengths as in `peers/mesh.py`; the
longest is cut at the context.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import grid
from evenload.core.costs.context import Direction
from evenload.core.costs.exposed import exposed_of_ranks
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import Lengths, StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import parse

sys.path.append(str(Path(__file__).parent))
from shared import Row, arguments, batches, finish, means, script, sets_of

MODELS = {
    **script("published/common.py").MODELS,
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
    pp: int
    dp: int
    tp: int
    samples: int
    context: int


CASES = (
    Case("llama-7b", 1, 64, 1, 512, 128 * K),
    Case("llama-13b", 1, 16, 8, 128, 128 * K),
    Case("llama-34b", 1, 16, 8, 128, 128 * K),
    Case("llama-34b", 1, 16, 8, 64, 512 * K),
    Case("llama-34b", 4, 16, 8, 128, 512 * K),
)


def chain_of(case: Case) -> PlanChain:
    plugins = ("packing", "mesh", *(("pipeline",) if case.pp > 1 else ()))
    recipe = parse(
        {
            "model": {"vocab_size": 32000, **MODELS[case.model]},
            "parallel": {"pp": case.pp, "dp": case.dp, "tp": case.tp},
            "train": {"dtype": "bf16", "global_batch_size": case.samples},
            "data": {"max_length": case.context},
            "cluster": "h200",
            "plugins": {name: {"enabled": True, "max_tokens": 32 * K} for name in plugins},
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout())


def in_halves(plan: StepPlan, chain: PlanChain, contention: float) -> Row:
    """Seconds of the busiest rank of a middle stage, as planned and in halves, and the traffic in it by kind."""
    context, limits = chain.context, plan.limits
    stage, layers = limits.num_stages // 2, limits.layers_per_stage
    now, halves, tensor, shared = (np.zeros(limits.num_ranks) for _ in range(4))
    backward = plan.backward or plan.micro_batches
    for passes, each in ((1, plan.micro_batches), (2, backward)):
        cost = (context.costs.forward, context.costs.backward)[passes - 1]
        direction = Direction(cost, passes, stage)
        for m in (one for one in each if one.slices):
            ranks = list(m.ranks)
            compute = np.asarray(context.costs.rank_s(m)[passes - 1], dtype=np.float64) - cost.launch_s
            open_s = exposed_of_ranks(context, direction, m)
            now[ranks] += compute + cost.launch_s + open_s
            hidden = np.minimum(compute, open_s)
            longest = np.maximum(compute + contention * hidden, open_s)
            in_turn = 2 * cost.launch_s + longest + hidden / (2 * layers)
            halves[ranks] += np.minimum(in_turn, compute + cost.launch_s + open_s)
            (shared if len(ranks) > 1 else tensor)[ranks] += open_s
    busiest = int(now.argmax())
    return {
        "busiest_s": float(now.max()),
        "in_halves_s": float(halves.max()),
        "open_alone_frac": float(tensor[busiest] / now[busiest]),
        "open_shared_frac": float(shared[busiest] / now[busiest]),
    }


def row_of(case: Case, name: str, lengths: Lengths, words: Any) -> Row:
    chain, rows = chain_of(case), []
    for batch in batches(lengths, case.context, case.samples, words.batches):
        plan = chain.plan(batch)
        outcome = outcome_of(plan, chain.context)
        one = in_halves(plan, chain, words.contention / 100)
        saved_s = one["busiest_s"] - one["in_halves_s"]
        rows.append({"step_s": outcome.step_s, "open_frac": outcome.exposed_frac, **one, "saved_s": saved_s})
    row = means(rows)
    about = {key: getattr(case, key) for key in ("model", "pp", "dp", "tp", "samples", "context")}
    return {**about, "lengths": name, **row, "gain": row["saved_s"] / row["step_s"]}


def benchmark(words: Any) -> Row:
    load_plugins()
    rows = [row_of(case, name, lengths, words) for name, lengths in sets_of(words.lengths).items() for case in CASES]
    return {"predicted": True, "contention": words.contention / 100, "batches": words.batches, "rows": rows}


def table(result: Row) -> Any:
    """A line a case and set."""
    lines = [
        (
            f"{row['model']}, PP {row['pp']} x DP {row['dp']} x TP {row['tp']}",
            f"{row['lengths']}, {row['samples']} to {row['context'] // K}K",
            seconds(row["step_s"]),
            f"{row['open_frac']:.1%}",
            f"{row['open_alone_frac']:.1%}",
            f"{row['open_shared_frac']:.1%}",
            f"{row['gain']:.1%}",
        )
        for row in result["rows"]
    ]
    head = ("layout", "samples", "step", "open traffic", "on one rank", "on several", "in turn, saved")
    caption = f"predicted; traffic takes {result['contention']:.0%} of a device from compute beside it"
    return grid("traffic that nothing hides, and halves that take turns", head, lines, caption)


if __name__ == "__main__":
    words = arguments(__doc__, contention=15, batches=2)
    finish(benchmark(words), words, table)
