"""Samples that several data-parallel ranks of a loop share: plans whose losses meet, and who needs which sample.

A loss function may hold a collective of all data-parallel ranks: the k-th losses of all of them must then run at once.
A rank that waits inside a shared micro-batch for a peer that waits in the loss of another one would wait for ever, so
plans that share micro-batches run in rounds: the k-th micro-batches of all ranks, a dummy where one has nothing to run,
which is what ranks that share experts do for layers with experts (`core.plan.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .....core.errors import PlanError
from .....core.laws import check
from .....core.plan.rounds import in_rounds, levelled
from .....core.plan.step_plan import Lengths, StepPlan
from .....core.planning.chain import PlanChain


def plan_in_rounds(chain: PlanChain, batch: Lengths) -> StepPlan:
    """The chain's plan of a batch, with the losses of all ranks in rounds where ranks share samples."""
    in_step = replace(chain.limits, in_step=chain.limits.num_ranks)

    def again() -> StepPlan:
        plan = replace(chain, limits=in_step).plan(batch)
        assert not plan.shared or plan.limits.in_step == plan.limits.num_ranks, "losses that do not meet would hang"
        return plan

    return meeting(chain.plan(batch), again)


def meeting(plan: StepPlan, again: Callable[[], StepPlan]) -> StepPlan:
    """A checked plan that shares micro-batches, with the losses of all ranks in rounds.

    Args:
        plan: any checked plan; one that shares nothing stays as it is.
        again: plans the batch for ranks in step, for an order that dummies alone bring into no rounds.
    """
    if not plan.shared:
        return plan
    if not plan.order:
        return check(_in_launch_rounds(plan))
    limits = replace(plan.limits, in_step=plan.limits.num_ranks)
    try:
        return check(in_rounds(plan.revised(limits=limits)))
    except PlanError:
        return again()


def _in_launch_rounds(plan: StepPlan) -> StepPlan:
    """A plan without an order of its own, in which every rank runs one micro-batch of each round: the schedule of all
    ranks of a stage is then one and the same."""
    launched = levelled(plan.micro_batches, plan.limits.num_ranks)
    number = {id(m): i for i, m in enumerate(plan.micro_batches)}
    old = [number.get(id(m)) for m in launched]
    recompute = tuple(tuple(0 if i is None else row[i] for i in old) for row in plan.recompute)
    offload = tuple(0.0 if i is None else plan.offload[i] for i in old) if plan.offload else ()
    return plan.revised(micro_batches=tuple(launched), recompute=recompute, offload=offload)
