"""Pipelines of nodes, each of which shares its tokens by Ulysses: what their scripts share.

A chain of planners on lanes (``parallel.pp`` stages of ``parallel.cp`` ranks), the least static recomputation with which
a baseline fits, and what a plan comes to in the simulator: exposed all-to-all, hand-over between stages, the output
layer on the last of them, memory under nine tenths of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from common import MODELS
from evenload.core.chain import PlanChain
from evenload.core.memory import fixed_bytes, peaks_of_stage
from evenload.core.predict import layers_again
from evenload.core.recipe import parse
from evenload.core.registry import Situation
from evenload.core.simulate import simulate
from evenload.core.workload import StepPlan
from evenload.face import load_plugins

FREE = 0.1
"""Of a device's memory, left to what is not predicted (`core.memory.room_bytes`)."""


@dataclass(frozen=True)
class Pipeline:
    """A model on ``pp`` stages of ``sp`` ranks."""

    model: str
    pp: int
    sp: int
    cluster: str

    @cache  # noqa: B019  # a script's settings live as long as the script
    def chain(self, plugin: str, max_tokens: int, planner: str = "", **words: Any) -> PlanChain:
        """The plugin, or one of its baselines, with ``max_tokens`` on a rank. Raises EvenloadError."""
        load_plugins()
        recipe = parse(
            {
                "model": {"vocab_size": 32000, **MODELS[self.model]},
                "parallel": {"pp": self.pp, "cp": self.sp, "dp": 1},
                "train": {"dtype": "bf16", "global_batch_size": 512},
                "cluster": self.cluster,
                "plugins": {plugin: {"enabled": True, "max_tokens": max_tokens, **words}},
            }
        )
        chain = PlanChain.of_recipe(recipe, recipe.layout())
        traffic = replace(chain.situation.traffic, engine="all_to_all")
        return replace(chain, situation=replace(chain.situation, traffic=traffic), instead=planner)


def missing_bytes(plan: StepPlan, situation: Situation) -> float:
    """By how much the fullest rank is over nine tenths of a device; negative where all fit."""
    memory = situation.costs.memory
    room = (1.0 - FREE) * situation.cluster.memory_bytes - fixed_bytes(memory, plan.limits)
    ranks = {r for m in plan.micro_batches for r in m.ranks[:1]}  # ranks of a lane hold the same
    return max(peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage, ranks)) - room


def recomputed(plan: StepPlan, layers: int) -> StepPlan:
    """The plan with as many layers of every micro-batch recomputed at every stage."""
    rows = ((layers,) * len(plan.micro_batches),) * plan.limits.num_stages
    return replace(plan, recompute=rows if layers else ())


def statically_recomputed(plan: StepPlan, situation: Situation) -> StepPlan:
    """With the least number of layers, the same everywhere, with which it fits; with all where none is enough."""
    low, high = 0, plan.limits.layers_per_stage
    while low < high:
        middle = (low + high) // 2
        fits = missing_bytes(recomputed(plan, middle), situation) <= 0
        low, high = (low, middle) if fits else (middle + 1, high)
    return recomputed(plan, low)


def judged(plan: StepPlan, situation: Situation) -> dict[str, Any]:
    """What a plan comes to.

    ``micro_batch_imbalance`` is the costliest micro-batch over the mean, both directions, launches left out;
    ``recompute_frac`` the share of recomputation in all compute.
    """
    outcome = simulate(plan, situation, record=False)
    busy = float(outcome.busy_s.sum())
    without = float(simulate(replace(plan, recompute=()), situation, record=False).busy_s.sum())
    launch_s = situation.costs.launch_s
    each = [sum(situation.costs.micro_batch_s(m)) - launch_s for m in plan.micro_batches if m.slices]
    return {
        "step_s": outcome.step_s,
        "bubble_frac": outcome.bubble_frac,
        "exposed_frac": outcome.exposed_frac,
        "recompute_frac": 1.0 - without / busy,
        "peak_bytes": float(outcome.peak_bytes.max()),
        "fits": missing_bytes(plan, situation) <= 0,
        "micro_batches": len(plan.micro_batches),
        "micro_batch_imbalance": max(each) * len(each) / sum(each),
        "layers_recomputed": layers_of(plan),
    }


def layers_of(plan: StepPlan) -> list[float]:
    """Layers that a micro-batch recomputes in the mean, by stage."""
    count, layers = len(plan.micro_batches), plan.limits.layers_per_stage
    return [sum(layers_again(plan, stage).values()) * layers / count for stage in range(plan.limits.num_stages)]


def fastest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest that fits; where none does, the one that needs least."""
    fitting = [one for one in found if one["fits"]]
    return min(fitting, key=lambda one: one["step_s"]) if fitting else min(found, key=lambda one: one["peak_bytes"])
