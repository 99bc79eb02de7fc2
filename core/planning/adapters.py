"""What tenants add to the costs of a frozen base, from the sizes of their adapters.

An adapter of w values adds to a token 2 w FLOPs forward and twice that backward, where each product of matrices has
one for its input's gradient and one for its weight's. Seconds are taken from those of the base: as many as so many more
weights of the base take forward. On a rank it holds value, gradient and its part of Adam's moments; a step sums the
gradients of all tenants over the ranks that hold equal parts of the model, and gathers what each of these updated.

Adapters of low rank run below the rate of the base's larger products; that is left out here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..costs.costs import BACKWARD_LINEAR, PassCost
from ..machine.shape import Shape
from ..recipe.adapter import DIVIDED_BYTES, STATE_BYTES, Adapter, adapter_weights
from .chain import PlanChain

VALUE_BYTES = 4
"""Of a value of an adapter, and of its gradient."""


class TenantLoad(NamedTuple):
    """A tenant as far as costs go."""

    adapter: Adapter
    tokens: float
    """Of its samples in a step; of all tenants only the ratios count."""


def with_tenants(chain: PlanChain, shape: Shape, tenants: Iterable[TenantLoad]) -> PlanChain:
    """The chain of a frozen base whose adapters are these. The chain given must know none yet.

    A mean token has the mean adapter: which tenant is where changes no plan.
    """
    sizes = [(adapter_weights(shape, one.adapter), one.tokens) for one in tenants]
    weights, tokens = sum(size for size, _ in sizes), sum(count for _, count in sizes)
    if not weights or not tokens:
        return chain
    context, costs = chain.context, chain.context.costs
    share = sum(size * count for size, count in sizes) / tokens / shape.dense_weights
    forward = PassCost(token_s=share * costs.forward.token_s)
    passes = BACKWARD_LINEAR + costs.recompute
    layout = context.layout
    values = weights / (layout.tp * layout.pp)
    memory = costs.memory.model_copy(
        update={
            "fixed_bytes": costs.memory.fixed_bytes + STATE_BYTES * values,
            "sharded_bytes": costs.memory.sharded_bytes + DIVIDED_BYTES * values,
        }
    )
    changes = {
        "forward": costs.forward.plus(forward),
        "backward": costs.backward.plus(PassCost(token_s=0.0 if context.forward_only else passes * forward.token_s)),
        "memory": memory,
    }
    known = replace(
        context,
        costs=costs.model_copy(update=changes),
        traffic=replace(context.traffic, adapter_bytes=VALUE_BYTES * values),
        head_frac=context.head_frac / (1.0 + share),
    )
    return replace(chain, context=known, limits=replace(chain.limits, memory=memory))
