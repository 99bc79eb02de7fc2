"""What a layer's tokens and experts cost under a planning context, for `core.experts.seconds`."""

from __future__ import annotations

from ..costs.context import PlanningContext
from ..experts.seconds import LayerCost


def layer_cost(context: PlanningContext, *, keep: bool = True, once_topk: int = 0) -> LayerCost | None:
    """What moves and computes in a layer of a stage; None where the costs know no seconds at experts.

    Copies and their gradients travel in the type that is trained. ``keep`` and ``once_topk`` as in `LayerCost`.
    """
    routed, costs = routed_per_token(context), context.costs
    if context.experts is None or not routed or not costs.both.expert_s:
        return None
    cluster, node_ranks = context.cluster, node_ranks_of(context)
    spans = not node_ranks and _ranks_per_node(context) % context.layout.ep
    return LayerCost(
        forward_s=costs.forward.expert_s / routed,
        backward_s=costs.backward.expert_s / routed,
        token_bytes=context.traffic.state_bytes_per_token,
        weight_bytes=context.experts.weight_bytes,
        gradient_bytes=context.experts.weight_bytes,
        intra=cluster.inter if spans else cluster.intra,
        inter=cluster.inter,
        node_ranks=node_ranks,
        keep=keep,
        once_topk=once_topk,
    )


def node_ranks_of(context: PlanningContext) -> int:
    """Neighbouring ranks of every group on one node; 0: all of them, or no number that divides the group evenly."""
    layout, ranks = context.layout, _ranks_per_node(context)
    begins_with_node = layout.pp == 1 or layout.dp_cp_size % ranks == 0
    return ranks if layout.ep > ranks and layout.ep % ranks == 0 and begins_with_node else 0


def routed_per_token(context: PlanningContext) -> float:
    """Experts that a token meets in the layers of a stage."""
    traffic = context.traffic
    return traffic.expert_bytes_per_token / traffic.state_bytes_per_token if traffic.state_bytes_per_token else 0.0


def _ranks_per_node(context: PlanningContext) -> int:
    return max(1, context.cluster.ranks_per_node // context.layout.tp)
