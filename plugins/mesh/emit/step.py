"""Micro-batches into plans: the token cap, ranks that run in step, and what every candidate is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ....core.costs.context import PlanningContext
from ....core.costs.memory import activation_budget_bytes, peaks_of_stage
from ....core.errors import EvenloadError
from ....core.plan.limits import Limits
from ....core.plan.rounds import idle, levelled
from ....core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from ....core.planning.stock import UNCAPPED
from ..config import MeshConfig


def limits_for(plan: StepPlan, context: PlanningContext, config: MeshConfig) -> Limits:
    """The plan's limits with a token cap: the least of all plugins', or what the device is predicted to hold."""
    limits = config.capped(plan.limits)
    if config.max_tokens is None and (limits.max_tokens >= UNCAPPED or not plan.micro_batches):
        held = _held_tokens(plan.limits, context, max(1, plan.num_tokens))
        return replace(limits, max_tokens=min(held, limits.max_tokens))
    return limits


def _held_tokens(limits: Limits, context: PlanningContext, most: int) -> int:
    """Tokens of each micro-batch that leave a rank of every stage within its memory. Raises EvenloadError."""
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, limits)
    one, two = (_peak(limits, tokens) for tokens in (1024, 2048))
    each, fixed = (two - one) / 1024, 2 * one - two
    tokens = int(min(most, (budget_bytes - fixed) / each if each > 0 else most))
    if tokens < 1:
        raise EvenloadError(
            "no token is predicted to fit into the device next to weights and optimizer",
            f"{budget_bytes - fixed:.3g} bytes left, {each:.3g} bytes a token",
            "set plugins.mesh.max_tokens, or recompute, or spread the model over more devices",
        )
    return tokens


def _peak(limits: Limits, tokens: int) -> float:
    """Bytes of the fullest stage with micro-batches of so many tokens, as many as the pipeline has in flight."""
    count = limits.num_stages + 1
    alone = replace(limits, num_ranks=1, max_tokens=UNCAPPED)
    plan = StepPlan(
        as_lengths([tokens] * count), tuple(MicroBatch((Slice(i, 0, tokens),), (0,)) for i in range(count)), alone
    )
    return max(peak for stage in range(limits.num_stages) for peak, _ in peaks_of_stage(plan, stage))


def step(incoming: StepPlan, limits: Limits, micro_batches: Iterable[MicroBatch], name: str) -> StepPlan:
    """A plan of these micro-batches in launch order; dummies for ranks without work, and where all run in step.

    Pipelines that share micro-batches run in step too: else stages that run ahead might wait in a circle.
    """
    launched = list(micro_batches)
    if limits.together > 1 or (limits.num_stages > 1 and any(len(m.ranks) > 1 for m in launched)):
        launched = levelled(launched, limits.num_ranks)
    launched += idle(launched, limits.num_ranks)
    return incoming.with_micro_batches(launched, limits, name)
