"""Which branches of the runtime the packing section opens."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.branches import CUT, PACKED, REGROUPED, REPLAYED
from .config import PackingConfig


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
