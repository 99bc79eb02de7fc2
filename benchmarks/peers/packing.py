"""Whole samples on data-parallel ranks, beside other people's rules. Predicted; planning is CPU seconds of one process.

    python benchmarks/peers/packing.py [--lengths FILE] [--ranks 64] [--samples 4096] [--cap 16384] [--batches 2]
                                       [--json] [--out FILE]

    evenload        `packing` with slices off: as it is, with equal_size, with group_size 8
    verl KK         largest differencing on 24,576 n + n^2 to ranks, then to as many micro-batches as the rank's tokens
                    need (verl's seqlen_balancing), sizes free or equal; of groups: on their sums. It heeds no token cap
    TRL bfd         best-fit-decreasing packs, dealt out in turn
    axolotl FFD     first-fit-decreasing packs, dealt out in turn (its multipack sampler)
    dp_balanced     Megatron's DpBalancedScheduler, the plugin's baseline of that name

Rules after their descriptions, by the same code for costs (verl-7b). Busiest over mean: predicted busy seconds of the
busiest rank over what each has where all is even, in as few micro-batches as the cap allows. Over the cap: share of
batches with a micro-batch of more tokens than --cap. "free" may deal samples as they like, "equal" must give every rank
as many, "groups" must keep eight neighbours together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.chains import batches, without_sums
from evenload.benchmarks.frame import Row, columns, main, means, options, timed
from evenload.benchmarks.peers.shared import case_result, sets_of, who_is_ahead
from evenload.core.balance.partition import best_fit_decreasing, karmarkar_karp
from evenload.core.plan.step_plan import Lengths, StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.data.samples.cut import cut
from evenload.plugins.packing.candidates import uncut

GROUP = 8
KINDS = {
    "free": [],
    "equal": ["plugins.packing.equal_size=true"],
    "groups": [f"plugins.packing.group_size={GROUP}"],
}
"""What may be dealt how, and the settings that ask evenload for it."""
Packs = list[list[list[int]]]


def workload(tokens: Any) -> Any:
    """verl's: of a 7B model, in any unit."""
    return 24576.0 * tokens + tokens**2.0


def verl(lengths: Lengths, ranks: int, cap: int, *, equal: bool = False, group: int = 1) -> Packs:
    """Samples of each rank and micro-batch."""
    own = [list(range(first, min(first + group, len(lengths)))) for first in range(0, len(lengths), group)]
    sums = [float(workload(lengths[samples]).sum()) for samples in own]
    packs = []
    for chosen in karmarkar_karp(sums, ranks, equal_size=equal):
        samples = [i for unit in chosen for i in own[unit]]
        count = min(len(samples), -(-int(lengths[samples].sum()) // cap))
        parts = karmarkar_karp(workload(lengths[samples]).tolist(), count) if samples else []
        packs.append([[samples[i] for i in part] for part in parts])
    return packs


def first_fit_decreasing(lengths: Lengths, cap: int) -> list[list[int]]:
    """Bins of at most ``cap`` tokens: longest first into the first that has room."""
    bins, free = list[list[int]](), np.full(len(lengths), cap)
    for i in np.argsort(-lengths, kind="stable").tolist():
        place = int((free >= lengths[i]).argmax())
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        free[place] -= lengths[i]
    return bins


def in_turn(bins: list[list[int]], ranks: int) -> Packs:
    return [bins[rank::ranks] for rank in range(ranks)]


def chain_of(kind: str, ranks: int, samples: int, cap: int) -> PlanChain:
    words = [f"parallel.dp={ranks}", f"train.global_batch_size={samples}", f"plugins.packing.max_tokens={cap}"]
    words += ["plugins.packing.slices=off", "costs=verl-7b", f"data.max_length={cap}", *KINDS[kind]]
    recipe = load_recipe("gpu-node", words)
    return without_sums(PlanChain.of_recipe(recipe, recipe.layout()))


def rules(kind: str, ranks: int, cap: int) -> dict[str, Callable[[Lengths], Packs]]:
    """Other people's, by name."""
    if kind == "equal":
        return {"verl KK, equal": lambda lengths: verl(lengths, ranks, cap, equal=True)}
    if kind == "groups":
        return {
            "verl KK, free": lambda lengths: verl(lengths, ranks, cap, group=GROUP),
            "verl KK, equal": lambda lengths: verl(lengths, ranks, cap, group=GROUP, equal=True),
        }
    return {
        "verl KK, free": lambda lengths: verl(lengths, ranks, cap),
        "TRL bfd": lambda lengths: in_turn(best_fit_decreasing(lengths, cap), ranks),
        "axolotl FFD": lambda lengths: in_turn(first_fit_decreasing(lengths, cap), ranks),
    }


def row_of(plan: StepPlan, chain: PlanChain, cap: int, plan_s: float) -> Row:
    outcome, costs, ranks = outcome_of(plan, chain.context), chain.context.costs, plan.limits.num_ranks
    fewest = max(min(ranks, len(plan.lengths)), -(-plan.num_tokens // cap))
    mean_s = (float(costs.sequence_s(plan.lengths).sum()) + fewest * costs.launch_s) / ranks
    busiest = float(outcome.busy_s.sum(axis=0).max()) / mean_s
    over = max(m.num_tokens for m in plan.micro_batches) > cap
    return {"busiest_over_mean": busiest, "step_s": outcome.step_s, "over_cap": over, "plan_s": plan_s}


def case_of(name: str, lengths: Lengths, kind: str, words: Any) -> list[Row]:
    """Rows of everybody for one set of lengths and one kind."""
    ranks, cap = words.ranks, words.cap
    chain = chain_of(kind, ranks, words.samples, cap)
    rows: dict[str, list[Row]] = {}
    for batch in batches(cut(lengths, cap, "split", 2).length, words.samples, words.batches):
        plan, plan_s = timed(lambda batch=batch: chain.plan(batch))
        rows.setdefault("evenload", []).append(row_of(plan, chain, cap, plan_s))
        others = {one: (lambda rule=rule, batch=batch: rule(batch)) for one, rule in rules(kind, ranks, cap).items()}
        for one, work in others.items():
            packs, plan_s = timed(work, 1)
            most = max(int(batch[pack].sum()) for of_rank in packs for pack in of_rank)
            limits = replace(chain.limits, max_tokens=max(cap, most))
            unplanned = StepPlan(batch, (), limits)
            rows.setdefault(one, []).append(row_of(uncut(unplanned, limits, packs, one), chain, cap, plan_s))
        if kind == "free":
            plan, plan_s = timed(lambda batch=batch: chain.baseline("dp_balanced", batch))
            rows.setdefault("Megatron DpBalanced", []).append(row_of(plan, chain, cap, plan_s))
    return [{"lengths": name, "kind": kind, "name": one, **means(each)} for one, each in rows.items()]


def benchmark(asked: Any) -> Row:
    named = sets_of(asked.lengths)
    cases = [case_of(name, lengths, kind, asked) for name, lengths in named.items() for kind in KINDS]
    return {"predicted": True, **case_result(asked, cases, "busiest_over_mean", "lengths", "kind")}


def table(result: Row) -> Any:
    """A line for each set, kind and rule."""
    cells = {
        "lengths": "{lengths}",
        "samples": "{kind}",
        "rule": "{name}",
        "busiest over mean": "{busiest_over_mean:.4f}",
        "over the cap": "{over_cap:percent}",
        "planning": lambda row: f"{1e3 * row['plan_s']:.1f} ms",
    }
    size = f"{result['samples']} on {result['ranks']} ranks, cap {result['cap']}, {result['batches']} batches"
    caption = f"busiest over mean is predicted; planning: CPU seconds; ahead of evenload: {who_is_ahead(result)}"
    return columns(f"whole samples on ranks: {size}", result["rows"], cells, caption)


if __name__ == "__main__":
    main(options(__doc__, lengths=[], ranks=64, samples=4096, cap=16384, batches=2), benchmark, table)
