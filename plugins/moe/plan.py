"""The policy of experts that a recipe asks for, and the planners of layers that it names."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.costs.context import PlanningContext
from ...core.experts.quotas import LayerPlanner
from ...core.plan.expert_policy import ExpertPolicy
from ...core.plan.step_plan import StepPlan
from .baselines import FROM_HISTORY
from .config import MoeConfig
from .exact import exact

LAYERS: Mapping[str, LayerPlanner] = {"clone": exact}


def plan(incoming: StepPlan, context: PlanningContext, config: MoeConfig) -> StepPlan:
    """The plan with the policy of its experts; unchanged where no rank shares experts with another."""
    if context.experts is None or context.layout.ep == 1:
        return incoming
    return incoming.revised(experts=policy_of(context, config, "clone"))


def policy_of(context: PlanningContext, config: MoeConfig, planner: str) -> ExpertPolicy:
    """What a recipe's settings come to for a planner of layers."""
    assert context.experts is not None
    slots = context.experts.num_experts // context.layout.ep if config.slots is None else config.slots
    return ExpertPolicy(planner, slots, config.tolerance or 1.0)


def needs_loads(config: MoeConfig, baseline: str) -> bool:
    """Whether the copies of the settings' mode, or of a baseline, come from the loads of earlier steps."""
    return baseline in FROM_HISTORY if baseline else config.mode != "clone"
