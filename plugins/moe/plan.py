"""The policy of experts that a recipe asks for, and the planners of layers that it names."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.costs.context import PlanningContext
from ...core.experts.quotas import LayerPlanner
from ...core.plan.branches import COPIED
from ...core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from ...core.plan.step_plan import StepPlan
from ...core.simulate.experts import node_ranks_of
from .baselines import FROM_HISTORY
from .config import MoeConfig
from .exact import exact
from .policy import can_pay, worthwhile

LAYERS: Mapping[str, LayerPlanner] = {"clone": exact}


def plan(incoming: StepPlan, context: PlanningContext, config: MoeConfig) -> StepPlan:
    """The plan with the policy of its experts; unchanged where no rank shares experts with another."""
    if context.experts is None or context.layout.ep == 1:
        return incoming
    return incoming.revised(experts=policy_of(incoming, context, config, "clone"))


def policy_of(incoming: StepPlan, context: PlanningContext, config: MoeConfig, planner: str) -> ExpertPolicy:
    """What a recipe's settings come to for a planner of layers; what they leave open the costs say.

    Mode auto leaves experts at home where no copy of any layer can pay.
    """
    assert context.experts is not None
    slots = context.experts.num_experts // context.layout.ep if config.slots is None else config.slots
    tolerance, least_tokens = worthwhile(incoming, context)
    if config.mode == "auto" and not can_pay(incoming, context, least_tokens):
        return EXPERTS_AT_HOME
    tolerance = tolerance if config.tolerance is None else config.tolerance
    keep = config.owners == "home"
    return ExpertPolicy(planner, slots, tolerance, least_tokens, node_ranks_of(context), keep)


def needs_loads(config: MoeConfig, baseline: str) -> bool:
    """Whether the copies of the settings' mode, or of a baseline, come from the loads of earlier steps."""
    return baseline in FROM_HISTORY if baseline else config.mode != "clone"


def shards_experts(config: MoeConfig) -> bool:
    """Whether every rank has a piece of every expert. Such pieces are let go behind each pass: to keep what was fetched
    would need the memory that cutting has saved."""
    return config.owners == "sharded"


def branches(config: MoeConfig, context: PlanningContext) -> dict[str, MoeConfig]:
    """The branch of the runtime that the settings open."""
    return {COPIED: config} if context.layout.ep > 1 else {}
