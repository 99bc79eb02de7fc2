"""Profiles of a frozen base: one tenant is trained on it, and what its adapter takes is taken off again.

Without any adapter nothing would run backward. So seconds are measured with one of rank 16 on all linear layers, whose
products leave the coefficients as plans add them for the tenants of a job (`plugins.lora.costs`): what such an
adapter takes beyond its share of the arithmetic stays in the coefficients of the base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...core.costs.costs import BACKWARD_LINEAR, Costs
from ...core.machine.shape import Shape
from ...core.plan.step_plan import StepPlan
from ...core.recipe.adapter import Adapter, TenantTrain
from ...integrations.host.host import Host
from ...integrations.host.trained import StepResult
from ...runtime.attention.pack import TokensOf
from .costs import adapter_weights

ADAPTER = Adapter(r=16)
TENANT = 0


def step(host: Host, plan: StepPlan, tokens_of: TokensOf, mark: Callable[[str], None]) -> StepResult:
    """A step at a learning rate of zero, all of it the tenant's, who joins before the first one."""
    if TENANT not in host.adapters.numbers:
        host.adapters.join(TENANT, ADAPTER, TenantTrain())
    owned = replace(plan, tenants=np.full(len(plan.lengths), TENANT))
    return host.train_step(owned, tokens_of, lr={TENANT: 0.0}, mark=mark)


def of_base(costs: Costs, shape: Shape) -> Costs:
    """Costs that were measured with the tenant as those of the frozen base."""
    share = adapter_weights(shape, ADAPTER) / shape.dense_weights
    forward_s = costs.forward.token_s / (1.0 + share)
    backward_s = max(0.0, costs.backward.token_s - BACKWARD_LINEAR * share * forward_s)
    return costs.model_copy(
        update={
            "forward": costs.forward.model_copy(update={"token_s": forward_s}),
            "backward": costs.backward.model_copy(update={"token_s": backward_s}),
            "frozen_base": True,
        }
    )
