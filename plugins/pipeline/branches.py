"""Which branches of the runtime the pipeline section opens."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.branches import CUT, RECOMPUTED, WEIGHT_PASSES
from .config import PipelineConfig


def branches(config: PipelineConfig, context: PlanningContext) -> dict[str, PipelineConfig]:
    """For each branch that plans may take, settings under the same caps with which they most likely do."""
    opened = {CUT: config} if config.chunks > 1 and context.layout.pp > 1 else {}
    if config.recompute == "auto":
        opened[RECOMPUTED] = config
    if config.split_backward != "off" and context.layout.pp > 1:
        opened[WEIGHT_PASSES] = config
    return opened
