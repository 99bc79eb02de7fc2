"""The policy of experts that a recipe asks for, and the planners of layers that it names."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.costs.context import PlanningContext
from ...core.experts.quotas import LayerPlanner
from ...core.plan.branches import COPIED, ONCE_A_NODE
from ...core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from ...core.plan.step_plan import StepPlan
from ...core.planning.notes import NO_EFFECT
from ...core.simulate.experts import node_ranks_of
from .baselines import FROM_HISTORY
from .clone import clone
from .config import MoeConfig
from .history import SLOTS_AHEAD, of_layers
from .policy import can_pay, keeps_copies, least_tokens, once_topk, slots_between_nodes, tokens_of_a_copy
from .reroute import evenly, reroute

LAYERS: Mapping[str, LayerPlanner] = {"clone": clone, "layout": evenly, "reroute": reroute}


def plan(incoming: StepPlan, context: PlanningContext, config: MoeConfig) -> StepPlan:
    """The plan with the policy of its experts; unchanged where no rank shares experts with another."""
    if context.experts is None or context.layout.ep == 1:
        return incoming
    planner = "clone" if config.mode == "auto" else config.mode
    policy = policy_of(incoming, context, config, planner)
    if planner != "clone":
        policy = policy._replace(copies=of_layers(context.experts, context.layout.ep, policy))
    notes = []
    if policy.once_topk:
        notes = [f"moe: a token goes once to each node of {policy.node_ranks} ranks, and on from there to its experts"]
    elif config.once_a_node:
        why = "ranks that share experts are in one node, or the trainer sends a token to each of its experts"
        notes = [f"{NO_EFFECT}plugins.moe.once_a_node true, as {why}"]
    return incoming.revised(experts=policy, notes=(*incoming.notes, *notes))


def policy_of(incoming: StepPlan, context: PlanningContext, config: MoeConfig, planner: str) -> ExpertPolicy:
    """What a recipe's settings come to for a planner of layers; what they leave open the costs say. Under a tolerance
    of its own a copy need not pay. Else mode auto leaves experts at home where no copy of any layer can pay."""
    assert context.experts is not None
    own = context.experts.num_experts // context.layout.ep
    most = own if planner == "clone" else min(own, SLOTS_AHEAD)
    slots = most if config.slots is None else config.slots
    may_keep, node_ranks = not shards_experts(config), node_ranks_of(context)
    if config.tolerance is None and config.mode == "auto" and not can_pay(incoming, context):
        topk = once_topk(incoming, context, config.once_a_node)
        return EXPERTS_AT_HOME._replace(node_ranks=node_ranks, once_topk=topk) if topk else EXPERTS_AT_HOME
    if config.tolerance is None and planner == "clone" and tokens_of_a_copy(context):
        wanted = config.once_a_node
        slots, keep, topk = slots_between_nodes(incoming, context, most=config.slots, may_keep=may_keep, wanted=wanted)
        least, tokens = least_tokens(context, keep=keep, topk=topk), tokens_of_a_copy(context, keep=keep)
        return ExpertPolicy(planner, slots, 1.0, least, node_ranks, keep, tokens, topk)
    keep = may_keep and keeps_copies(incoming, context, slots)
    topk = once_topk(incoming, context, config.once_a_node)
    least = 0 if config.tolerance is not None else least_tokens(context, keep=keep, topk=topk)
    tolerance = 1.0 if config.tolerance is None else config.tolerance
    return ExpertPolicy(planner, slots, tolerance, least, node_ranks, keep, once_topk=topk)


def needs_loads(config: MoeConfig, baseline: str) -> bool:
    """Whether the copies of the settings' mode, or of a baseline, come from the loads of earlier steps."""
    return baseline in FROM_HISTORY if baseline else config.mode in ("layout", "reroute")


def shards_experts(config: MoeConfig) -> bool:
    """Whether every rank has a piece of every expert. Such pieces are freed after each pass: to keep what was fetched
    would need the memory that cutting has saved."""
    return config.owners == "sharded"


def branches(config: MoeConfig, context: PlanningContext) -> dict[str, MoeConfig]:
    """The branch of the runtime that the settings open."""
    if context.layout.ep == 1:
        return {}
    goes_once = config.once_a_node is not False and context.experts and context.experts.once_topk
    return {COPIED: config} | ({ONCE_A_NODE: config} if goes_once and node_ranks_of(context) else {})
