"""One gradient sum per step, whatever number of micro-batches each rank has run.

Megatron's DDP with ``overlap_grad_reduce`` remembers how often each parameter became ready in its first step and starts
the reduction of a bucket when that number is reached again. With other numbers of micro-batches from step to step it
starts too early, and later gradients are added to a buffer that is already on the wire: a silent race. Two protocols
are safe:

    quiet   every backward under ``ddp.no_sync()``; then ``ddp.start_grad_sync()`` on every rank; then finish. Right for
            any plan, also for a rank without work, and nothing is reduced while ranks share a micro-batch. Buckets
            overlap with each other, not with backward.
    last    ``no_sync`` for all but a rank's last micro-batch, which Megatron's schedules do with
            ``config.no_sync_func``. Overlaps with that last backward. Needs a micro-batch on every rank.

`Reduction` takes ``last`` where Megatron's schedule runs the plan and every rank has work, and ``quiet`` otherwise; the
plan is the same on all ranks, so all take the same. Without overlap neither is needed: hooks only add.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

from ...core.plan.branches import SUM_AFTER_PASSES, SUM_IN_LAST_BACKWARD
from ...core.plan.step_plan import StepPlan
from ...runtime.attention.pack import Pack
from ...runtime.attributes import with_attributes
from ...runtime.measure.busy import BusyClock
from ...runtime.world.replicas import job_group
from .exchange import Exchange
from .model.experts import routers


class Reduction:
    """The gradient sum of one step: set up before the schedule runs, `finalize` called by it at the end.

    ``divisor``: of the global batch, where its targets have weights (`labels.loss_divisor`); None: their number.
    ``exchange``: with the other replicas of the job, if there are any.
    """

    def __init__(
        self, ddp: Any, plan: StepPlan, clock: BusyClock, divisor: float | None = None, exchange: Exchange | None = None
    ) -> None:
        self._ddp, self._clock = ddp, clock
        self._divisor, self._exchange = divisor, exchange
        idle = any(not plan.of_rank(rank) for rank in range(plan.limits.num_ranks))
        self.overlap: bool = ddp.ddp_config.overlap_grad_reduce
        self.quiet = self.overlap and (idle or not plan.in_host_schedule)
        ddp.config.no_sync_func = ddp.no_sync if self.overlap and not self.quiet else None
        ddp.config.finalize_model_grads_func = self.finalize
        for router in routers(ddp):
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()
        self.totals: tuple[float, int] = (0.0, 0)
        """(sum of token losses, target tokens) of the global batch, once finalized."""
        self.local_loss: torch.Tensor | float = 0.0
        self.local_targets = 0

    def computing(self) -> AbstractContextManager[Any]:
        """Holds around all forwards and backwards of the step."""
        context: AbstractContextManager[Any] = self._ddp.no_sync() if self.quiet else nullcontext()
        return context

    @property
    def divisor(self) -> float:
        """What the sums of losses and gradients are divided by, once finalized; 0 where there is nothing to divide."""
        return self.totals[1] if self._divisor is None else self._divisor

    @property
    def branch(self) -> str:
        """Which protocol this step takes, in the words of `core.plan.branches`."""
        return SUM_AFTER_PASSES if self.quiet or not self.overlap else SUM_IN_LAST_BACKWARD

    def count(self, pack: Pack, _: torch.Tensor, report: dict[str, torch.Tensor]) -> None:
        """Count a micro-batch of the last stage. Only one tensor-parallel rank collects."""
        self.local_loss += report["loss_sum"]
        self.local_targets += pack.num_targets

    def finalize(self, model: Any, num_tokens: Any = None, pg_collection: Any = None, **_: Any) -> None:
        """Sum over data-parallel ranks and divide by the divisor of the global batch, in float64.

        The sum, and what else a model needs (norm gradients under tensor parallelism, ...), is Megatron's
        ``finalize_model_grads``. Its division is done here: upstream multiplies by 1 / tokens rounded to float32, which
        puts one common factor of up to 6e-8 on all gradients of a float64 run. In float32 both are the same number.
        """
        with self._clock.noting("G"):
            if self.quiet:
                for group in self._ddp.bucket_groups + self._ddp.expert_parallel_bucket_groups:
                    group.start_grad_sync()
            # The bias of experts moves with the update (`move_biases`), and not where gradients alone are asked for.
            with with_attributes(self._ddp.config, moe_router_enable_expert_bias=False):
                finalize_model_grads([self._ddp], None, pg_collection=pg_collection)
            if self._exchange and job_group():
                gather_shards(self._ddp)
                self._exchange.sum(lambda parameter: parameter.main_grad)
        self.totals = _sum_over_world(self.local_loss, self.local_targets, next(self._ddp.parameters()).device)
        if self.divisor:
            self._ddp.scale_gradients(1.0 / self.divisor)


def _sum_over_world(loss_sum: Any, num_targets: int, device: torch.device) -> tuple[float, int]:
    totals = torch.full((2,), num_targets, dtype=torch.float64, device=device)
    totals[0] = loss_sum
    dist.all_reduce(totals)
    if job := job_group():  # which sums what one rank of each replica says
        if dist.get_rank():
            totals.zero_()
        job.add_up(totals)
    loss, count = totals.tolist()
    return loss, round(count)


def gather_shards(ddp: Any) -> None:
    """Make every data-parallel rank hold the whole gradient sum, where the distributed optimizer left it in shards.

    A rank's own shard keeps its value, so an update afterwards is the same. Collective.
    """
    if not ddp.ddp_config.use_distributed_optimizer:
        return
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(dist.get_world_size(ranks))[dist.get_rank(ranks)]
            dist.all_gather_into_tensor(bucket.grad_data, own.clone(), group=ranks)


def move_biases(ddp: Any) -> None:
    """Megatron's update of the biases of experts, by the loads of the global batch that has just run. Collective."""
    if ddp.config.moe_router_enable_expert_bias:
        _update_router_expert_bias([ddp], ddp.config)


@torch.no_grad()
def gradient_norm(model: torch.nn.Module, tp_rank: int) -> float:
    """Norm of the whole model's gradient in float64, from ``main_grad`` that every rank with the same part of the model
    holds whole. Experts lie on expert-parallel ranks, whose other weights are alike; of a tied embedding the first
    stage's counts."""
    parameters: list[Any] = list(model.parameters())
    dense, experts = parameters[0].new_zeros(2, dtype=torch.float64)
    for parameter in (p for p in parameters if p.requires_grad):
        if getattr(parameter, "shared", False):
            continue
        if not getattr(parameter, "allreduce", True):
            experts += parameter.main_grad.double().square().sum()
        elif tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False):
            dense += parameter.main_grad.double().square().sum()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return float((dense + experts).sqrt())
