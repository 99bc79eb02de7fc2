"""Sequences shared by ranks next to Megatron's schedulers. All predicted; planning is CPU seconds of one process.

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

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.chains import SEED, batches, without_sums
from evenload.benchmarks.frame import Row, columns, main, means, options, timed
from evenload.benchmarks.planning import mesh as planning
from evenload.benchmarks.published.lengths import drawn
from evenload.core.plan.step_plan import Lengths, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut

H200_WORDS = [
    "costs=verl-7b",
    "plugins.packing.max_tokens=16384",
    "plugins.mesh.enabled=true",
    "data.max_length=262144",
]
LONGEST = {"A100": 384 * 1024, "H200": 256 * 1024}
MOST_LINES = 60_000
"""Of a file of lengths."""
LONG_TAIL = "long tail (log-normal)"
"""After long prompts of conversations, an assumption: median 6,800 tokens, shape 1.1, up to 131,072."""


def sets_of(files: Iterable[str]) -> dict[str, Lengths]:
    """Lengths by name: the files, or a stand-in for Wikipedia where there are none, and a drawn long tail."""
    named = {Path(path).stem: read_lengths(Path(path))[:MOST_LINES] for path in files}
    if not named:
        named = {"wikipedia-like": as_lengths(drawn("wikipedia-like", MOST_LINES))}
    tail = np.random.default_rng(SEED).lognormal(np.log(6800), 1.1, MOST_LINES)
    return {**named, LONG_TAIL: as_lengths(tail.astype(np.int64).clip(16, 131_072))}


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
    for batch in batches(cut(lengths, LONGEST[machine], "split", 2).length, words.samples, words.batches):
        for one, make in makers.items():
            plan, plan_s = timed(lambda make=make, batch=batch: make(batch), 1)
            outcome = outcome_of(plan, chain.context)
            row = {"step_s": outcome.step_s, "busiest_over_mean": outcome.imbalance, "plan_s": plan_s}
            rows.setdefault(one, []).append(row)
    return [{"lengths": name, "machine": machine, "name": one, **means(each)} for one, each in rows.items()]


def benchmark(asked: Any) -> Row:
    named = sets_of(asked.lengths)
    planning.balanced_cp(np.array([1]), 1, 1)  # so that no row counts its import
    cases = [case_of(name, lengths, machine, asked) for name, lengths in named.items() for machine in LONGEST]
    rows = [{**row, "over_evenload": row["step_s"] / case[0]["step_s"]} for case in cases for row in case]
    ahead = [row for row in rows if row["over_evenload"] < 1 - 1e-6]
    sizes = {key: getattr(asked, key) for key in ("ranks", "samples", "batches")}
    return {"predicted": True, **sizes, "rows": rows, "ahead": ahead}


def table(result: Row) -> Any:
    """A line for each set, machine and rule."""
    cells = {
        "lengths": "{lengths}",
        "machine": "{machine}",
        "rule": "{name}",
        "step": "{step_s:seconds}",
        "of evenload's": "{over_evenload:.2f}x",
        "busiest over mean": "{busiest_over_mean:.3f}",
        "planning": "{plan_s:seconds}",
    }
    size = f"{result['samples']} on {result['ranks']} ranks, {result['batches']} batches"
    ahead = "; ".join(f"{row['lengths']}, {row['machine']}: {row['name']}" for row in result["ahead"])
    caption = f"predicted; planning: CPU seconds; ahead of evenload: {ahead or 'nobody'}"
    return columns(f"sequences shared by ranks: {size}", result["rows"], cells, caption)


if __name__ == "__main__":
    main(options(__doc__, lengths=[], ranks=64, samples=512, batches=2), benchmark, table)
