"""How far plans are above their certified bounds, term by term, and what a bound takes. Predicted; seconds measured.

    python benchmarks/planning/bounds.py [--wiki FILE] [--mooncake FILE] [--runs 5] [--quick] [--json] [--out FILE]

Llama-13B and TP 8 on H200 where there are stages, 7B else, caps of 16,384 tokens, sequences up to
128K; one step, drawn as training draws it. Without files, lengths are the stand-ins of published/lengths.py:
``wikipedia-like``, and ``byted-like`` for Mooncake's trace. "before" is the step over what plans carried before stages,
traffic and memory were in their bounds: compute and launches of a mean stage. Behind it the terms are put in one after
the other: head and traffic of tensor parallelism, ways in and out and ramps, memory, and what comes after the passes.
"bound" is CPU seconds of one bound, the first of its kind left out; "planning" those of its plan, least of runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.balance import step_bound
from evenload.core.balance.bound import lower_bound_s
from evenload.core.costs.context import PlanningContext
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import budget_bytes, certified_s, judge, outcome_of
from evenload.core.recipe.recipe import parse
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import SampleOrder
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "published"))
from common import MODELS
from lengths import K, corpus

CAP, LONGEST, SEED = 16 * K, 128 * K, 1234
STAND_INS = {"wiki": "wikipedia-like", "mooncake": "byted-like"}


class Case(NamedTuple):
    """A step that is planned."""

    plugins: tuple[str, ...]
    lengths: str
    pp: int
    dp: int
    tp: int
    count: int


PIPELINE, MESH, SLICES = ("pipeline",), ("mesh",), ("packing",)
ALL = ("packing", "mesh", "pipeline")
CASES = (
    Case(PIPELINE, "wiki", 8, 1, 8, 64),
    Case(PIPELINE, "mooncake", 8, 1, 8, 32),
    Case(ALL, "wiki", 4, 16, 8, 512),
    Case(ALL, "mooncake", 4, 16, 8, 128),
    Case(MESH, "wiki", 1, 64, 1, 512),
    Case(MESH, "mooncake", 1, 64, 1, 512),
    Case(SLICES, "wiki", 1, 64, 1, 512),
    Case(SLICES, "wiki", 1, 512, 1, 4096),
)


def chain_of(case: Case) -> PlanChain:
    """The chain of a case."""
    recipe = parse(
        {
            "model": {"vocab_size": 32000, **MODELS["llama-13b" if case.pp > 1 else "llama-7b"]},
            "parallel": {"pp": case.pp, "dp": case.dp, "tp": case.tp},
            "train": {"dtype": "bf16", "global_batch_size": case.count},
            "cluster": "h200",
            "plugins": {name: {"enabled": True, "max_tokens": CAP} for name in case.plugins},
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout())


def drawn(case: Case, files: dict[str, Path | None]) -> tuple[str, Lengths]:
    """What lengths stand for it, and the first batch of a training on them."""
    file = files[case.lengths]
    if file:
        label, body = file.name, read_lengths(file)
    else:
        label, body = corpus(STAND_INS[case.lengths], 64 * case.count, 1 << 30)
    samples = cut(np.asarray(body, dtype=np.int64), LONGEST, "split", 2).length
    samples = np.tile(samples, -(-case.count // len(samples)))
    places, _ = SampleOrder(len(samples), SEED).take(case.count)
    return label, as_lengths(samples[places])


def before_s(chain: PlanChain, batch: Lengths) -> float:
    """Compute and launches of a mean stage."""
    context = chain.context
    if any(plugin.shares for plugin, _ in chain.links):
        costs = context.costs.both
        n = batch.astype(np.float64)
        work = costs.linear_s * n.sum() + 0.5 * costs.pair_s * float(n @ n)
        return float(work / chain.limits.num_ranks + costs.launch_s)
    return lower_bound_s(batch, chain.caps, context.costs)


def terms_of(chain: PlanChain, batch: Lengths, fits: bool, certified: float) -> dict[str, float]:
    """The bound with one term after the other."""
    caps, context = chain.caps, chain.context
    shares = any(plugin.shares for plugin, _ in chain.links)

    def bound(at: PlanningContext, room_bytes: float = np.inf) -> float:
        return step_bound.passes_bound_s(batch, caps, at, shares=shares, room_bytes=room_bytes)

    work_s = max(
        float(stage.both.linear_s * batch.sum() + 0.5 * stage.both.pair_s * np.square(batch, dtype=np.float64).sum())
        / caps.num_ranks
        for stage in step_bound.stage_costs(context)
    )
    before = before_s(chain, batch)
    rows = {
        "before": before,
        "head, traffic": max(before, work_s),
        "launches, ways, ramp": max(before, bound(context)),
        "memory": max(before, bound(context, budget_bytes(caps, context) if fits else np.inf)),
    }
    return rows | {"all, after passes": certified}


def cpu_s(work: Callable[[], Any], runs: int) -> float:
    """The least CPU seconds of some runs."""
    taken = []
    for _ in range(runs):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def row_of(case: Case, files: dict[str, Path | None], runs: int) -> dict[str, Any]:
    chain = chain_of(case)
    label, batch = drawn(case, files)
    plan = chain.plan(batch)
    outcome, certified = outcome_of(plan, chain.context), certified_s(plan, chain.context)
    stage_s = (outcome.busy_s + outcome.exposed_s).mean(axis=1).max()
    terms = terms_of(chain, batch, judge(plan, chain.context).fits, certified)
    return {
        "case": f"{' + '.join(case.plugins)}, {case.lengths} {case.count}, PP {case.pp} x DP {case.dp} x TP {case.tp}",
        "lengths": label,
        "step_s": outcome.step_s,
        "bound_s": certified,
        "over": {name: outcome.step_s / bound_s for name, bound_s in terms.items()},
        "over_busiest_stage": outcome.step_s / float(stage_s),
        "made_by": plan.made_by,
        "micro_batches": len(plan.micro_batches),
        "plan_cpu_s": cpu_s(lambda: chain.plan(batch), runs),
        "bound_cpu_s": cpu_s(lambda: chain._bounded(plan), runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wiki", type=Path)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the pipelines alone, planned once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    load_plugins()
    cases, runs = (CASES[:2], 1) if words.quick else (CASES, words.runs)
    files = {"wiki": words.wiki, "mooncake": words.mooncake}
    rows = [row_of(case, files, runs) for case in cases]
    result = {"predicted": True, "rows": rows}
    if words.out:
        words.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(result, words.json, table)


def table(result: dict[str, Any]) -> Table:
    """A row a case."""
    rows = result["rows"]
    names = list(rows[0]["over"])
    return grid(
        "Step over its certified bound (predicted)",
        ("case", "step", *names, "busiest stage", "planning", "bound"),
        [
            (
                row["case"],
                seconds(row["step_s"]),
                *(f"{row['over'][name]:.3f}" for name in names),
                f"{row['over_busiest_stage']:.3f}",
                seconds(row["plan_cpu_s"]),
                seconds(row["bound_cpu_s"]),
            )
            for row in rows
        ],
        "Each column adds a term to the bound of the one before it.",
    )


if __name__ == "__main__":
    main()
