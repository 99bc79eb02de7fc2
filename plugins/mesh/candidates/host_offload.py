"""Activations in host memory, for plans that no device would hold otherwise (ByteScale, arXiv 2502.21231, section 4).

First the share of each micro-batch that hides behind its own compute (`core.costs.offload`), which costs nothing; if
that is not enough, all that may travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....core.costs.context import PlanningContext
from ....core.costs.offload import KEPT_LAYERS, offload_share
from ....core.plan.step_plan import MicroBatch, StepPlan
from ....core.plan.token_layout import tokens_of_ranks


def offloaded(plan: StepPlan, context: PlanningContext) -> Iterator[StepPlan]:
    """The plan with what hides in host memory, then with all that may be; none where there is no way to the host."""
    rate, layers = context.cluster.host_bytes_per_s, plan.limits.mean_layers
    per_token = plan.limits.memory.activation_bytes_per_token / layers
    if not rate or layers <= KEPT_LAYERS:
        return

    def share(m: MicroBatch) -> float:
        each_s = context.costs.micro_batch_s(m)[0] / layers
        tokens = max(tokens_of_ranks(m).values()) if m.slices else 0
        return offload_share(each_s, tokens * per_token, rate)

    hidden = tuple(share(m) for m in plan.micro_batches)
    if any(hidden):
        yield replace(plan, offload=hidden)
    if min(hidden, default=1.0) < 1.0:
        yield replace(plan, offload=tuple(1.0 if m.slices else 0.0 for m in plan.micro_batches))
