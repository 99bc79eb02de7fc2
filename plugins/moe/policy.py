"""What costs and cluster say of copies: when they pay.

A copy pays if it takes more tokens off the busiest rank than its weights, and its gradient on the way home, take
seconds (`core.experts.seconds.paying_tokens`): on NVLink 4 some hundred, between nodes some thousands, on CPU ranks
some tens. Counts are known only inside a layer, so that number goes to the planner of layers as `least_tokens`, and
each layer of each micro-batch has copies where they pay there.

Loads are evened to the last token where they pay: copies of different ranks travel at once, so that stopping at 1 %
over the mean saves a third of the copies and no time. A tolerance is the recipe's to set, where copies take memory.
"""

from __future__ import annotations

import math

from ...core.costs.context import PlanningContext
from ...core.costs.rounds import rounds_of
from ...core.experts.seconds import paying_tokens
from ...core.plan.step_plan import StepPlan
from ...core.planning.judge import judge
from ...core.simulate.experts import layer_cost, routed_per_token

_COPIES = 2
"""Of a layer on a rank, about as many as exact loads need."""


def least_tokens(context: PlanningContext, *, keep: bool = True) -> int:
    """Tokens that copies of a layer must take off the busiest rank; 0 where the costs know no seconds at experts.

    ``keep``: copies stay until their backward, else their weights travel twice.
    """
    cost = layer_cost(context, keep=keep)
    return math.ceil(paying_tokens(cost)) if cost else 0


def can_pay(plan: StepPlan, context: PlanningContext) -> bool:
    """Whether a copy would pay if all tokens of a mean round went to one rank."""
    return _routed_tokens(plan, context) * (context.layout.ep - 1) >= least_tokens(context)


def keeps_copies(plan: StepPlan, context: PlanningContext, slots: int) -> bool:
    """Whether the predicted peak of a plan leaves memory for the copies of all forwards that wait for a backward."""
    assert context.experts is not None
    ranks = range(plan.limits.num_ranks)
    waiting = max(len(plan.of_rank(rank)) for rank in ranks)
    if not plan.order and not plan.cut:
        waiting = min(waiting, plan.limits.num_stages)
    copies = min(slots, _COPIES) * context.traffic.moe_layers * waiting
    return judge(plan, context).missing_bytes + copies * context.experts.weight_bytes <= 0


def _routed_tokens(plan: StepPlan, context: PlanningContext) -> float:
    """Routed tokens of a mean rank in a layer of a mean forward."""
    rounds = [each.mean for op, each in rounds_of(plan, 0, context.layout.ep).items() if op.kind == "F"]
    layers = max(1, context.traffic.moe_layers)
    return sum(rounds) / len(rounds) * routed_per_token(context) / layers if rounds else 0.0
