"""What costs and cluster say of copies: what a layer's tokens and experts cost, when a copy pays, how even is enough.

A copy pays if it takes more tokens off the busiest rank than its weights, and its gradient on the way home, take
seconds (`core.experts.seconds.paying_tokens`): on NVLink 4 some thousand, between nodes some thousands, on CPU ranks
some tens. Counts are known only inside a layer, so that number goes to the planner of layers as `least_tokens`, and
each layer of each micro-batch has the copies that pay there. Rank loads within that number of each other are even
enough, up to UltraEP's 1 % over the mean (its beta, arXiv 2606.04101, section 4); a third of the copies go there.
"""

from __future__ import annotations

import math

from ...core.costs.context import PlanningContext
from ...core.costs.rounds import rounds_of
from ...core.experts.seconds import LayerCost, paying_tokens
from ...core.plan.step_plan import StepPlan

EVEN_ENOUGH = 1.01


def layer_cost(context: PlanningContext) -> LayerCost | None:
    """Of one layer of a stage under the recipe's costs; None where the costs know no seconds at experts."""
    routed, traffic, costs = _routed_per_token(context), context.traffic, context.costs
    if context.experts is None or not routed or not costs.both.expert_s:
        return None
    cluster, node_ranks = context.cluster, node_ranks_of(context)
    spans = not node_ranks and _ranks_per_node(context) % context.layout.ep
    return LayerCost(
        forward_s=costs.forward.expert_s / routed,
        backward_s=costs.backward.expert_s / routed,
        token_bytes=traffic.state_bytes_per_token,
        weight_bytes=context.experts.weight_bytes,
        gradient_bytes=context.experts.weight_bytes,
        intra=cluster.inter if spans else cluster.intra,
        inter=cluster.inter,
        node_ranks=node_ranks,
    )


def node_ranks_of(context: PlanningContext) -> int:
    """Neighbouring ranks of every group on one node; 0: all of them, or no number that divides the group evenly."""
    layout, ranks = context.layout, _ranks_per_node(context)
    begins_with_node = layout.pp == 1 or layout.dp_cp_size % ranks == 0
    return ranks if layout.ep > ranks and layout.ep % ranks == 0 and begins_with_node else 0


def worthwhile(plan: StepPlan, context: PlanningContext) -> tuple[float, int]:
    """Tolerance, and the fewest tokens that a copy must take off the busiest rank, for the rounds of a plan.

    (1, 0), which is exact, where the costs know no seconds at experts.
    """
    cost = layer_cost(context)
    if cost is None:
        return 1.0, 0
    least = math.ceil(paying_tokens(cost))
    mean = _routed_tokens(plan, context)
    return min(EVEN_ENOUGH, 1.0 + least / mean) if mean else 1.0, least


def can_pay(plan: StepPlan, context: PlanningContext, least_tokens: int) -> bool:
    """Whether a copy would pay if all tokens of a mean round went to one rank."""
    return _routed_tokens(plan, context) * (context.layout.ep - 1) >= least_tokens


def _routed_tokens(plan: StepPlan, context: PlanningContext) -> float:
    """Of a mean rank in a layer of a mean forward."""
    rounds = [each.mean for op, each in rounds_of(plan, 0, context.layout.ep).items() if op.kind == "F"]
    layers = max(1, context.traffic.moe_layers)
    return sum(rounds) / len(rounds) * _routed_per_token(context) / layers if rounds else 0.0


def _routed_per_token(context: PlanningContext) -> float:
    """Experts that a token meets in the layers of a stage."""
    traffic = context.traffic
    return traffic.expert_bytes_per_token / traffic.state_bytes_per_token if traffic.state_bytes_per_token else 0.0


def _ranks_per_node(context: PlanningContext) -> int:
    return max(1, context.cluster.ranks_per_node // context.layout.tp)
