"""Which settings of the section a plan of somebody else does not keep, and which branches of the runtime they open."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.branches import CUT, PACKED, REGROUPED, REPLAYED
from ...core.plan.step_plan import StepPlan
from .config import PackingConfig


def breaks(plan: StepPlan, config: PackingConfig) -> str:
    """The first setting that a plan does not keep, with what it does instead; empty where it keeps all."""
    starts = [s.start for m in (*plan.micro_batches, *plan.backward) for s in m.slices]
    odd = next((start for start in starts if start % config.block_tokens), 0)
    rules = (
        (config.slices == "off" and plan.cut, f"slices is off, {len(plan.cut)} sequences are cut"),
        (odd, f"block_tokens is {config.block_tokens}, a slice starts at {odd}"),
        (not config.asymmetric and plan.backward, "asymmetric is false, the backward has groups of its own"),
    )
    return next((f"plugins.packing.{words}" for broken, words in rules if broken), "")


def branches(config: PackingConfig, context: PlanningContext) -> dict[str, PackingConfig]:
    """For each branch that plans may take, settings under the same caps with which they most likely do."""
    even = config.model_copy(update={"slices": "even"})
    opened = {PACKED: config}
    if config.slices != "off":
        opened[CUT] = even
        if config.activation_gib:
            opened[REPLAYED] = even
        if config.asymmetric and context.costs.recompute:
            opened |= {REPLAYED: even, REGROUPED: even}
    return opened
