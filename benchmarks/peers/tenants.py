"""Tenants on a pipeline: evenload's joint steps beside LoRAFusion's groups that never drain. All predicted.

    python benchmarks/peers/tenants.py [--lengths FILE] [--stages 4] [--tenants 16] [--steps 3] [--json] [--out FILE]

    evenload        every step of all tenants is one plan of `pipeline`; the pipeline drains with the update
    LoRAFusion      adapters in groups, one of short samples with one of long ones; each group's step in best-fit packs
                    of the cap; steps of groups follow each other in 1F1B, never drained (arXiv 2510.00206), in as many
                    groups as keep a step of a group from meeting its own last one. Steady: what each further round
                    of steps takes. Without its integer program and its merging of packs across groups
    never drained   evenload's plan of all steps at once: about what not draining would give it; no plan to run

The rule is written after the paper. LLaMA-13B on PP 4, 70B on PP 8, frozen, adapters of rank 16, H100, cap 8,192, 4 or
16 samples a step of each tenant, each tenant at a place of its own in the set of lengths, cut at 4,096.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import Row, columns, main, options, timed
from evenload.benchmarks.peers.shared import sets_of
from evenload.benchmarks.published.common import MODELS
from evenload.core.balance.partition import best_fit_decreasing
from evenload.core.laws import check
from evenload.core.plan.step_plan import Lengths, MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.adapters import TenantLoad, with_tenants
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.sizes import shape_of

CAP, LONGEST = 8192, 4096
SAMPLES = (4, 16)
ROUNDS = 3
"""Times that the steps are repeated, to see what a further one takes."""
Draws = list[list[Lengths]]
"""For each step the lengths of each tenant."""


def tenants_chain(stages: int, tenants: int) -> PlanChain:
    recipe = recipe_of(
        {
            "model": {"vocab_size": 32000, **MODELS["llama-13b" if stages <= 4 else "llama-70b"]},
            "parallel": {"pp": stages, "dp": 1, "tp": 1},
            "train": {"dtype": "bf16", "global_batch_size": 512},
            "cluster": "h100",
            "plugins": {**plugins(CAP, "pipeline"), "lora": {"enabled": True}},
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    return with_tenants(chain, shape_of(recipe.model), [TenantLoad(Adapter(r=16), 1)] * tenants)


def drawn(lengths: Lengths, tenants: int, samples: int, steps: int) -> Draws:
    """Each tenant reads on from a place of its own, so tenants differ as far as parts of the set do."""
    starts = np.random.default_rng(1).integers(0, len(lengths), tenants)
    parts = [lengths[(start + np.arange(samples * steps)) % len(lengths)].clip(16, LONGEST) for start in starts]
    return [[as_lengths(part[samples * k : samples * (k + 1)]) for part in parts] for k in range(steps)]


def groups_of(draws: Draws, stages: int) -> list[list[int]]:
    """Tenants from both ends of their mean lengths together, in as many groups as leave a step of each group at least
    as many packs of others as there are stages before its next one; all in one where there are too few."""
    means = [float(np.mean(np.concatenate(own))) for own in zip(*draws, strict=True)]
    order = sorted(range(len(means)), key=lambda k: means[k])
    tokens = [float(np.mean([each.sum() for each in own])) for own in zip(*draws, strict=True)]
    for count in range(max(1, len(order) // 2), 0, -1):
        groups: list[list[int]] = [[] for _ in range(count)]
        left = list(order)
        for turn in range(len(order)):
            groups[turn // 2 % count].append(left.pop(0 if turn % 2 else -1))
        packs = [-(-sum(tokens[k] for k in group) // CAP) for group in groups]
        if count == 1 or sum(packs) - max(packs) >= stages - 1:
            return groups
    return []


def staggered(draws: Draws, groups: list[list[int]]) -> Iterator[list[int]]:
    """Packs in the order in which they run, by numbers of the samples of all steps."""
    first = 0
    for step in draws:
        begins = first + np.concatenate([[0], np.cumsum([len(own) for own in step])])
        lengths = np.concatenate(step)
        for group in groups:
            numbers = [n for k in group for n in range(int(begins[k] - first), int(begins[k + 1] - first))]
            for pack in best_fit_decreasing(lengths, CAP, numbers):
                yield [first + n for n in pack]
        first = int(begins[-1])


def steady_s(chain: PlanChain, draws: Draws, groups: list[list[int]]) -> float:
    """Seconds of a further round of all steps, none drained."""

    def step_s(rounds: int) -> float:
        repeated = draws * rounds
        lengths = as_lengths(np.concatenate([own for step in repeated for own in step]))
        packs = staggered(repeated, groups)
        micro_batches = tuple(MicroBatch(tuple(Slice(i, 0, int(lengths[i])) for i in pack), (0,)) for pack in packs)
        plan = StepPlan(lengths, micro_batches, replace(chain.limits, max_tokens=CAP), made_by="LoRAFusion")
        return outcome_of(check(plan), chain.context).step_s

    return (step_s(ROUNDS) - step_s(1)) / (ROUNDS - 1)


def row_of(name: str, lengths: Lengths, samples: int, words: Any) -> Row:
    chain = tenants_chain(words.stages, words.tenants)
    draws = drawn(lengths, words.tenants, samples, words.steps)
    joint_s = plan_s = 0.0
    bubbles = []
    for step in draws:
        plan, taken_s = timed(lambda step=step: chain.plan(as_lengths(np.concatenate(step))), 1)
        outcome = outcome_of(plan, chain.context)
        joint_s, plan_s = joint_s + outcome.step_s / words.steps, plan_s + taken_s / words.steps
        bubbles.append(outcome.bubble_frac)
    groups = groups_of(draws, words.stages)
    never = chain.plan(as_lengths(np.concatenate([own for step in draws for own in step])))
    never_s = outcome_of(never, chain.context).step_s / words.steps
    theirs_s = steady_s(chain, draws, groups) / words.steps
    about = {"lengths": name, "stages": words.stages, "tenants": words.tenants, "samples": samples}
    times = {"step_s": joint_s, "lorafusion_s": theirs_s, "never_drained_s": never_s, "plan_s": plan_s}
    return {**about, "groups": len(groups), "bubble_frac": float(np.mean(bubbles)), **times}


def benchmark(words: Any) -> Row:
    named = sets_of(words.lengths)
    rows = [row_of(name, lengths, samples, words) for name, lengths in named.items() for samples in SAMPLES]
    behind = [{"lengths": r["lengths"], "samples": r["samples"]} for r in rows if r["lorafusion_s"] < r["step_s"]]
    return {"predicted": True, "rows": rows, "behind": behind}


def table(result: Row) -> Any:
    """A line for each set and number of samples."""
    cells = {
        "lengths": "{lengths}",
        "tenants": "{tenants} x {samples}",
        "evenload's step": "{step_s:seconds}",
        "bubble": "{bubble_frac:percent}",
        "LoRAFusion's": lambda row: f"{row['lorafusion_s'] / row['step_s']:.3f}x ({row['groups']} groups)",
        "never drained gains": lambda row: f"{row['step_s'] / row['never_drained_s']:.3f}x",
        "planning": "{plan_s:seconds}",
    }
    caption = f"predicted; planning: CPU seconds; rows where LoRAFusion is ahead: {len(result['behind'])}"
    return columns(f"tenants on {result['rows'][0]['stages']} stages", result["rows"], cells, caption)


if __name__ == "__main__":
    main(options(__doc__, lengths=[], stages=4, tenants=16, steps=3), benchmark, table)
