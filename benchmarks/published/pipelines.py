"""Pipelines of nodes, each of which shares its tokens by Ulysses: what their scripts share.

A chain of planners on lanes (``parallel.pp`` stages of ``parallel.cp`` ranks), and what a plan comes to in the
simulator: exposed all-to-all, hand-over between stages, the output layer on the last of them, and memory, of which a
tenth of a device stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from evenload.benchmarks.chains import chain_of, plugins, with_launches, with_traffic
from evenload.benchmarks.published.common import MODELS
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.memory import activation_budget_bytes, peaks_of_stage
from evenload.core.plan.step_plan import StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.simulate.events import play
from evenload.core.simulate.passes import PassTimes
from evenload.core.simulate.predict import layers_again
from evenload.core.simulate.step import simulate


@dataclass(frozen=True)
class Pipeline:
    """A model on ``pp`` stages of ``sp`` ranks."""

    model: str
    pp: int
    sp: int
    cluster: str

    @cache  # noqa: B019  # a script's settings live as long as the script
    def chain(self, plugin: str, max_tokens: int, planner: str = "", **words: Any) -> PlanChain:
        """The plugin, or one of its baselines, with ``max_tokens`` on a rank; ranks exchange all to all.

        Its measured rates know no latency: that of a stage's layers, two a layer and direction, counts as launch.
        Raises EvenloadError.
        """
        chain = chain_of(
            {
                "model": {"vocab_size": 32000, **MODELS[self.model]},
                "parallel": {"pp": self.pp, "cp": self.sp, "dp": 1},
                "train": {"dtype": "bf16", "global_batch_size": 512},
                "cluster": self.cluster,
                "plugins": plugins(max_tokens, plugin, **words),
            }
        )
        context = with_traffic(chain, cp_comm="all_to_all").context
        calls_s = 2 * context.traffic.layers * (self.sp - 1) * context.cluster.intra.latency_s
        context = with_launches(context, lambda _, launch_s: launch_s + calls_s)
        return replace(chain, context=context, instead=planner)


def missing_bytes(plan: StepPlan, context: PlanningContext) -> float:
    """By how much the fullest rank has too little room; negative where all fit."""
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, plan.limits)
    ranks = {r for m in plan.micro_batches for r in m.ranks[:1]}  # ranks of a lane hold the same
    return (
        max(peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage, ranks))
        - budget_bytes
    )


def judged(plan: StepPlan, context: PlanningContext) -> dict[str, Any]:
    """What a plan comes to.

    ``micro_batch_imbalance`` is the costliest micro-batch over the mean, both directions, launches left out;
    ``recompute_frac`` the share of recomputation in all compute.
    """
    outcome = simulate(plan, context, record=False)
    busy = float(outcome.busy_s.sum())
    without = float(simulate(replace(plan, recompute=()), context, record=False).busy_s.sum())
    launch_s = context.costs.launch_s
    each = [sum(context.costs.micro_batch_s(m)) - launch_s for m in plan.micro_batches if m.slices]
    return {
        "step_s": outcome.step_s,
        "bubble_frac": outcome.bubble_frac,
        "exposed_frac": outcome.exposed_frac,
        "recompute_frac": 1.0 - without / busy,
        "peak_bytes": float(outcome.peak_bytes.max()),
        "fits": missing_bytes(plan, context) <= 0,
        "micro_batches": len(plan.micro_batches),
        "micro_batch_imbalance": max(each) * len(each) / sum(each),
        "layers_recomputed": layers_of(plan),
    }


def noisy_seconds(plan: StepPlan, context: PlanningContext, spread: float, tries: int = 3) -> float:
    """Until the last pass ends, where each takes more or less than predicted by a normal share; mean of some draws."""
    work, rng = PassTimes(plan, context), np.random.default_rng(0)
    waits = context.traffic.waits_for_sends and not plan.order
    ends = []
    for _ in range(tries):
        events = play(
            plan,
            lambda stage, op: work.seconds(stage, op) * max(0.0, rng.normal(1.0, spread)),
            work.hand_over,
            waits=waits,
        )
        ends.append(max(event.free_s for event in events))
    return float(np.mean(ends))


def layers_of(plan: StepPlan) -> list[float]:
    """Layers that a micro-batch recomputes on average, by stage."""
    count, layers = len(plan.micro_batches), plan.limits.layers_per_stage
    return [sum(layers_again(plan, stage).values()) * layers / count for stage in range(plan.limits.num_stages)]


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest that fits; where none does, the one that needs least."""
    fitting = [one for one in rows if one["fits"]]
    return min(fitting, key=lambda one: one["step_s"]) if fitting else min(rows, key=lambda one: one["peak_bytes"])
