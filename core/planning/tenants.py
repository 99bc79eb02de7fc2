"""The last step of planning: whose each sequence is, written into a plan that is complete but for it."""

from __future__ import annotations

from collections.abc import Iterable

from ..costs.context import PlanningContext
from ..errors import PlanError
from ..plan.step_plan import Lengths, StepPlan, as_lengths
from ..registry import PluginConfig, SlicePlugin


def of_tenants(
    plan: StepPlan,
    tenants: Lengths | None,
    context: PlanningContext,
    of_slices: Iterable[tuple[SlicePlugin, PluginConfig]] = (),
) -> StepPlan:
    """The plan with a tenant for each sequence and the slices of its micro-batches as planners of slices order them.

    Args:
        tenants: number of each sequence's tenant [S]; None leaves the plan as it is.

    Raises PlanError where tenants are not one for each sequence; laws are the caller's to check.
    """
    if tenants is None:
        return plan
    if len(tenants) != len(plan.lengths):
        detail = f"{len(tenants)} tenants, {len(plan.lengths)} sequences"
        raise PlanError("a batch has not one tenant for each sequence", detail, "give the number of each one's tenant")
    owned = plan.revised(tenants=as_lengths(tenants))
    for plugin, config in of_slices:
        owned = plugin.plan(owned, context, config)
    return owned
