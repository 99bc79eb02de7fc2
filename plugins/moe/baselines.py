"""Other people's answers to where experts run, from their papers and documents, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.costs.context import PlanningContext
from ...core.experts.quotas import LayerPlanner
from ...core.plan.expert_policy import EXPERTS_AT_HOME
from ...core.plan.step_plan import StepPlan


def static(incoming: StepPlan, context: PlanningContext, config: Any) -> StepPlan:
    """Expert parallelism as the trainer has it: every token goes to its expert's home."""
    return incoming.revised(experts=EXPERTS_AT_HOME)


BASELINES: Mapping[str, Callable[[StepPlan, PlanningContext, Any], StepPlan]] = {"static": static}
LAYERS: Mapping[str, LayerPlanner] = {}
FROM_HISTORY: frozenset[str] = frozenset()
"""Baselines that choose copies from the loads of earlier steps."""
