"""What costs and cluster say of copies: when they pay, and for how many there is room.

A copy pays if it takes more tokens off the busiest rank than its weights, and its gradient on the way home, take
seconds (`core.experts.seconds.paying_tokens`): on NVLink 4 some hundred, between nodes some thousands, on CPU ranks
some tens. Counts are known only inside a layer, so that number goes to the planner of layers as `least_tokens`, and
each layer of each micro-batch has copies where they pay there.

Loads are evened to the last token where they pay: copies of different ranks travel at once, so that stopping at 1 %
over the mean saves a third of the copies and no time. A tolerance is the recipe's to set, where copies take memory.

Between nodes copies also keep tokens inside their node (`nodes`), the more the more slots a rank has. These cost
memory: kept until the backward, in every layer and forward that waits for one; fetched again, in one layer at a time,
next to their gradients, but their weights travel twice. Of the two, mean loads choose.
"""

from __future__ import annotations

import math

from ...core.costs.context import PlanningContext
from ...core.costs.rounds import rounds_of
from ...core.experts.seconds import copy_tokens, exchanged_s, paying_tokens
from ...core.plan.step_plan import StepPlan
from ...core.planning.judge import judge
from ...core.simulate.experts import layer_cost, node_ranks_of, routed_per_token

_COPIES = 2
"""Of a layer on a rank, about as many as exact loads need."""


def least_tokens(context: PlanningContext, *, keep: bool = True, topk: int = 0) -> int:
    """Tokens that copies of a layer must take off the busiest rank; 0 where the costs know no seconds at experts.

    ``keep``: copies stay until their backward, else their weights travel twice. ``topk``: what `once_topk` says.
    """
    cost = layer_cost(context, keep=keep, once_topk=topk)
    return math.ceil(paying_tokens(cost)) if cost else 0


def can_pay(plan: StepPlan, context: PlanningContext) -> bool:
    """Whether a copy would pay if all tokens of a mean round went to one rank."""
    return _routed_tokens(plan, context) * (context.layout.ep - 1) >= least_tokens(context)


def keeps_copies(plan: StepPlan, context: PlanningContext, slots: int) -> bool:
    """Whether the predicted peak of a plan leaves memory for the copies of all forwards that wait for a backward."""
    return _copies_kept(plan, context, _free_bytes(plan, context)) >= min(slots, _COPIES)


def tokens_of_a_copy(context: PlanningContext, *, keep: bool = True) -> int:
    """Tokens that may cross between nodes while one copy travels; 0 in one node, or where the costs know no experts."""
    cost = layer_cost(context, keep=keep)
    return math.ceil(copy_tokens(cost)) if cost and cost.node_ranks else 0


def once_topk(plan: StepPlan, context: PlanningContext, wanted: bool | None) -> int:
    """Experts of a token where it is to go once to each node, 0 where once to each expert: as is ``wanted``, or by
    what mean loads take without copies."""
    return min(_dispatches(context, wanted), key=lambda topk: _exchanges_s(plan, context, topk, True, 0))


def slots_between_nodes(
    plan: StepPlan, context: PlanningContext, *, most: int | None, may_keep: bool, wanted: bool | None
) -> tuple[int, bool, int]:
    """Slots of a rank, as many as its own experts and as many for local copies as memory has room for, ``most`` at
    most; whether copies stay until their backward; and `once_topk`: whichever takes least for mean loads, counting what
    copies take."""
    assert context.experts is not None
    ep, size, num_experts = context.layout.ep, node_ranks_of(context), context.experts.num_experts
    own, free = num_experts // ep, _free_bytes(plan, context)
    kept = _copies_kept(plan, context, free) if may_keep else 0.0
    again = free / (2 * context.experts.weight_bytes)
    options = []
    for keep, copies in ((kept >= min(own, _COPIES), kept), (False, again)):
        rounds = max(0, int(min(copies - _COPIES, (ep // size - 1) * own, math.inf if most is None else most - own)))
        for topk in _dispatches(context, wanted):
            takes_s = min(_exchanges_s(plan, context, topk, keep, count) for count in (0, rounds))
            options.append((-takes_s, keep, own + rounds if most is None else most, topk))
    _, keep, slots, topk = max(options)
    return slots, keep, topk


def _dispatches(context: PlanningContext, wanted: bool | None) -> tuple[int, ...]:
    """The values of `once_topk` among which to choose."""
    topk = context.experts.once_topk if context.experts and node_ranks_of(context) else 0
    return (0,) if wanted is False or not topk else (topk,) if wanted else (0, topk)


def _exchanges_s(plan: StepPlan, context: PlanningContext, topk: int, keep: bool, rounds: int) -> float:
    """Seconds between nodes in both passes of a layer with mean loads and so many rounds of local copies."""
    cost, experts = layer_cost(context, keep=keep, once_topk=topk), context.experts
    if cost is None or experts is None or not cost.node_ranks:
        return 0.0
    num_nodes, own = context.layout.ep // cost.node_ranks, experts.num_experts // context.layout.ep
    inside = rounds * cost.node_ranks / experts.num_experts
    share = (1 - 1 / num_nodes - inside) / (num_nodes - 1)
    copied = (rounds + own - 1) * copy_tokens(cost) if rounds else 0.0
    tokens_s = exchanged_s(_routed_tokens(plan, context), share, num_nodes, experts.num_experts, cost)
    return tokens_s + 4 * copied * cost.token_bytes / cost.inter.bytes_per_s


def _free_bytes(plan: StepPlan, context: PlanningContext) -> float:
    return -judge(plan, context).missing_bytes


def _copies_kept(plan: StepPlan, context: PlanningContext, free_bytes: float) -> float:
    """Copies of each layer on a rank that there is room for in all forwards that wait for a backward."""
    assert context.experts is not None
    waiting = max(len(plan.of_rank(rank)) for rank in range(plan.limits.num_ranks))
    if not plan.order and not plan.cut:
        waiting = min(waiting, plan.limits.num_stages)
    held = context.traffic.moe_layers * waiting * context.experts.weight_bytes
    return free_bytes / held if held else math.inf


def _routed_tokens(plan: StepPlan, context: PlanningContext) -> float:
    """Routed tokens of a mean rank in a layer of a mean forward."""
    rounds = [each.mean for op, each in rounds_of(plan, 0, context.layout.ep).items() if op.kind == "F"]
    layers = max(1, context.traffic.moe_layers)
    return sum(rounds) / len(rounds) * routed_per_token(context) / layers if rounds else 0.0
