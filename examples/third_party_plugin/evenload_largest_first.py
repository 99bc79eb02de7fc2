"""An evenload plugin from another package: every rank launches its largest micro-batches first.

A step then reaches its highest memory at its start, so a recipe that does not fit fails in its first seconds and not
at an unlucky batch. The sum of gradients does not depend on the order of micro-batches, so nothing else changes.

Install it (``pip install examples/third_party_plugin``), see it in ``evenload plugins``, and switch it on:

    plugins:
      largest_first: {enabled: true, min_tokens: 4096}
"""

from __future__ import annotations

from evenload import MicroBatch, PlanningContext, PluginConfig, StepPlan, StepPlugin, register
from pydantic import Field


class LargestFirstConfig(PluginConfig):
    """The section ``plugins.largest_first`` of a recipe."""

    min_tokens: int = Field(default=0, ge=0)
    """Micro-batches with fewer tokens keep their order behind the larger ones."""


def plan(plan: StepPlan, context: PlanningContext, config: LargestFirstConfig) -> StepPlan:
    """The same plan with its largest micro-batches first.

    Slices of one sequence must run in order, and so must the passes of pipeline stages: a plan that has either stays
    as it is, with a note.
    """
    if plan.cut or plan.order or plan.backward:
        return plan.revised(notes=(*plan.notes, "largest_first: the order of this plan is not free"))

    def key(micro_batch: MicroBatch) -> int:
        return -micro_batch.num_tokens if micro_batch.num_tokens >= config.min_tokens else 0

    return plan.revised(micro_batches=tuple(sorted(plan.micro_batches, key=key)))


register(
    StepPlugin(
        name="largest_first",
        summary="runs the largest micro-batches of a step first",
        papers=(),
        stage=50,  # after packing (20), mesh (30) and pipeline (40), whose micro-batches it rearranges
        config=LargestFirstConfig,
        plan=plan,
    )
)
