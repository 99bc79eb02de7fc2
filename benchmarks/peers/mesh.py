"""Sequences shared by ranks beside Megatron's schedulers. All predicted; planning is CPU seconds of one process.

    python benchmarks/peers/mesh.py [--lengths FILE] [--ranks 64] [--samples 512] [--batches 2] [--json] [--out FILE]

    evenload        packing and mesh
    BalancedCP      BalancedCPScheduler of the installed megatron-core, each sequence a micro-batch of its own
    dynamic_cp      DefaultDynamicCPScheduler of Megatron-LM's main: the plugin's baseline of that name, which packs
    cp_all          every sequence on all ranks: the plugin's baseline, static context parallelism

    A100            GPT-7B with FlexSP's coefficients on A100-40G, cap 8,192, up to 384K tokens, launches left out
    H200            verl-7b on H200s, cap 16,384, up to 256K tokens

Ranks that share a sequence do so in the way predicted fastest. A step of a peer is that of its micro-batches in its own
order, without a barrier between its groups, which is to its advantage.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.commands.tables.show import grid
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import Lengths, StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of

sys.path.append(str(Path(__file__).parent))
from shared import Row, arguments, batches, finish, leaders, means, script, sets_of, timed, without_sums

planning = script("planning/mesh.py")

H200_WORDS = [
    "costs=verl-7b",
    "plugins.packing.max_tokens=16384",
    "plugins.mesh.enabled=true",
    "data.max_length=262144",
]
LONGEST = {"A100": 384 * 1024, "H200": 256 * 1024}


def chain_of(machine: str, ranks: int, samples: int) -> PlanChain:
    if machine == "A100":
        return planning.launched_free(planning.mesh_chain(ranks, planning.MEGATRON_CAP, zero=False))
    recipe = load_recipe("gpu-node", [*H200_WORDS, f"parallel.dp={ranks}", f"train.global_batch_size={samples}"])
    return without_sums(PlanChain.of_recipe(recipe, recipe.layout()))


def balanced_cp(batch: Lengths, chain: PlanChain) -> StepPlan:
    """The plan of the wheel's scheduler: its groups one after the other."""
    cap = chain.caps.max_tokens
    groups, _ = planning.balanced_cp(batch, chain.limits.num_ranks, cap)
    micro_batches = []
    for group in groups:
        numbers = list(dict.fromkeys(i for own in group for i in own))
        for m in planning.plan_of(group, batch, chain).micro_batches:
            (piece,) = m.slices
            micro_batches.append(m._replace(slices=(piece._replace(sequence=numbers[piece.sequence]),)))
    most = max(-(-m.num_tokens // len(m.ranks)) + 2 for m in micro_batches)
    return StepPlan(batch, tuple(micro_batches), replace(chain.limits, max_tokens=max(cap, most)), made_by="BalancedCP")


def case_of(name: str, lengths: Lengths, machine: str, words: Any) -> list[Row]:
    chain = chain_of(machine, words.ranks, words.samples)
    makers = {
        "evenload": chain.plan,
        "Megatron BalancedCP": lambda batch: balanced_cp(batch, chain),
        "Megatron DefaultDynamicCP": lambda batch: chain.baseline("dynamic_cp", batch),
        "cp_all": lambda batch: chain.baseline("cp_all", batch),
    }
    rows: dict[str, list[Row]] = {}
    for batch in batches(lengths, LONGEST[machine], words.samples, words.batches):
        for one, make in makers.items():
            plan, plan_s = timed(lambda make=make, batch=batch: make(batch), 1)
            outcome = outcome_of(plan, chain.context)
            row = {"step_s": outcome.step_s, "busiest_over_mean": outcome.imbalance, "plan_s": plan_s}
            rows.setdefault(one, []).append(row)
    return [{"lengths": name, "machine": machine, "name": one, **means(each)} for one, each in rows.items()]


def benchmark(words: Any) -> Row:
    named = sets_of(words.lengths)
    planning.balanced_cp(np.array([1]), 1, 1)  # so that no row counts its import
    cases = [case_of(name, lengths, machine, words) for name, lengths in named.items() for machine in LONGEST]
    for case in cases:
        for row in case:
            row["over_evenload"] = row["step_s"] / case[0]["step_s"]
    behind = [
        {"lengths": case[0]["lengths"], "machine": case[0]["machine"], "ahead": ahead}
        for case in cases
        if (ahead := leaders(case, "step_s"))
    ]
    about = {key: getattr(words, key) for key in ("ranks", "samples", "batches")}
    return {"predicted": True, **about, "rows": [row for case in cases for row in case], "behind": behind}


def table(result: Row) -> Any:
    """A line for each set, machine and rule."""
    lines = [
        (
            row["lengths"],
            row["machine"],
            row["name"],
            seconds(row["step_s"]),
            f"{row['over_evenload']:.2f}x",
            f"{row['busiest_over_mean']:.3f}",
            seconds(row["plan_s"]),
        )
        for row in result["rows"]
    ]
    head = ("lengths", "machine", "rule", "step", "of evenload's", "busiest over mean", "planning")
    behind = "; ".join(f"{one['lengths']}, {one['machine']}: {', '.join(one['ahead'])}" for one in result["behind"])
    size = f"{result['samples']} on {result['ranks']} ranks, {result['batches']} batches"
    caption = f"predicted; planning: CPU seconds; ahead of evenload: {behind or 'nobody'}"
    return grid(f"sequences shared by ranks: {size}", head, lines, caption)


if __name__ == "__main__":
    words = arguments(__doc__, ranks=64, samples=512, batches=2)
    finish(benchmark(words), words, table)
