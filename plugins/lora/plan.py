"""Slices of one tenant lie side by side in a micro-batch, so that each adapter multiplies one run of its tokens."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.step_plan import MicroBatch, StepPlan
from .config import LoraConfig


def plan(incoming: StepPlan, context: PlanningContext, config: LoraConfig) -> StepPlan:
    """The plan with the slices of its micro-batches in the order of their tenants; unchanged without tenants."""
    if not len(incoming.tenants):
        return incoming
    tenants = incoming.tenants.tolist()
    forward, backward = (
        tuple(_by_tenant(m, tenants) for m in ms) for ms in (incoming.micro_batches, incoming.backward)
    )
    return incoming.revised(micro_batches=forward, backward=backward)


def _by_tenant(micro_batch: MicroBatch, tenants: list[int]) -> MicroBatch:
    """Stable: the slices of a sequence keep their order."""
    places = sorted(range(len(micro_batch.slices)), key=lambda i: tenants[micro_batch.slices[i].sequence])
    groups = micro_batch.cp_groups
    return micro_batch._replace(
        slices=tuple(micro_batch.slices[i] for i in places),
        cp_groups=tuple(groups[i] for i in places) if groups else (),
    )
