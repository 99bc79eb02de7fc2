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
from ...core.experts.seconds import paying_tokens
from ...core.plan.step_plan import StepPlan
from ...core.simulate.experts import layer_cost, routed_per_token

EVEN_ENOUGH = 1.01


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
    return sum(rounds) / len(rounds) * routed_per_token(context) / layers if rounds else 0.0
