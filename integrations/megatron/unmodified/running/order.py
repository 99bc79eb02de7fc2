"""The order of a plan around a user's ``forward_step_func``, in place of Megatron's own schedule.

The executor (`runtime.stage.executor`) runs the passes: slices with prefix KV, layers recomputed by stage and
micro-batch, weight gradients as passes of their own. The user's function is called once for each forward, its loss
function once for each micro-batch at the last stage, and their gradients are summed and finalized as the stock schedule
does it:

    no_sync     around all passes; where reduction overlaps, it starts after the last one, since a plan has another
                number of micro-batches in every step and on every rank
    finalize    ``config.finalize_model_grads_func`` with the number of tokens that the loss functions counted
    reports     in the order in which losses were computed; on other stages none
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from .....core.errors import EvenloadError
from .....core.laws import check
from .....core.plan.order import orders_of_stage
from .....core.plan.program import lower
from .....core.plan.step_plan import MicroBatch, Op, StepPlan
from .....runtime.attention.prefix import PrefixStore
from .....runtime.experts.gate import ExpertGate
from .....runtime.measure.busy import BusyClock
from .....runtime.stage.stage_links import StageLinks
from .....runtime.world.plane import Plane
from ....host.step import Position, run_program
from ...base.families import unwrapped_chunk
from ...stage import FixedShape, MegatronStage
from ..reading.context_parallel import data_rank
from ..refusals.supported import collection
from .objective import refuse_loss


class LoopStep(ABC):
    """A training call of a loop that nobody edits, as `run_order` runs it."""

    gate: ExpertGate | None
    shape: FixedShape | None = None
    """Of micro-batches that stay as they are."""

    @abstractmethod
    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None) -> Any:
        """A micro-batch of the plan in the user's form, with its pack."""

    @abstractmethod
    def listening(self) -> AbstractContextManager[Any]:
        """Inside, the model hears of what runs; afterwards it is as it was."""

    @abstractmethod
    def run(self, loaded: Any, chunk: Any) -> tuple[Any, Callable[..., Any] | None]:
        """(output, loss function) of the user's function for what was loaded."""


def run_order(
    plan: StepPlan,
    step: LoopStep,
    *,
    chunk: Any,
    links: StageLinks | None,
    plane: Plane | None,
    rest: Mapping[str, Any],
) -> list[Any]:
    """All passes of this rank and the gradient sum; the reports of its loss functions.

    Args:
        plan: with equally many micro-batches on all ranks (`with_dummies`).
        chunk: Megatron's DistributedDataParallel around the model.
        rest: the other arguments of Megatron's schedule: ``force_all_reduce`` leaves the whole gradient sum on every
            rank, ``pg_collection`` goes to ``finalize_model_grads_func``.
    """
    gpt = unwrapped_chunk(chunk)
    config, device = get_model_config(chunk), next(gpt.parameters()).device
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if hasattr(chunk, "set_is_first_microbatch"):
        chunk.set_is_first_microbatch()
    forward = _Forward(step, device)
    position = Position(parallel_state.get_pipeline_model_parallel_rank(), data_rank(), links, plane)
    trainer = MegatronStage(chunk, gpt, load=step.load, step=forward, gate=step.gate, shape=step.shape)
    program = lower(plan, position.stage, position.rank)
    with step.listening(), (config.no_sync_func or nullcontext)():
        run_program(plan, program, trainer, position, BusyClock(device))
    groups = collection(rest.get("pg_collection"))
    _sum_gradients(chunk, forward.num_tokens, bool(rest.get("force_all_reduce")), groups)
    if timers is not None:
        timers("forward-backward").stop()
    return forward.reports


class _Forward:
    """A user's function as `MegatronStage` calls its forwards; keeps what its loss functions return."""

    def __init__(self, step: LoopStep, device: torch.device) -> None:
        self._step = step
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        self.reports: list[Any] = []

    def __call__(self, packed: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
        output, loss_func = self._step.run(packed, chunk)

        def kept(output: Tensor) -> Any:
            returned: Any = None if loss_func is None else loss_func(output)
            if returned is None:
                refuse_loss(returned, None, output)
            if not returned[0].requires_grad:
                raise EvenloadError(
                    "the loss of a micro-batch is not connected to the model's output",
                    f"a loss without gradient, for {packed.num_counted:g} tokens with loss",
                    "multiply by loss_mask and sum, also where it is all zero: other slices need this one's gradients",
                )
            if len(returned) == 3:
                self.num_tokens += returned[1]
            self.reports.append(returned[-1])
            return returned

        return output, kept


def with_dummies(plan: StepPlan, of_host: Callable[[int], int] | None = None) -> StepPlan:
    """The plan with dummies in front, on ranks that have fewer losses than others, or than the host's schedule takes.
    ``of_host``: the least number that it takes, if so many are needed.

    So a collective in the loss function meets its partners: the k-th loss of a rank needs none but earlier ones of its
    own, which have met theirs. In an order all dummies run forward, then all backward, at every stage. In front, for
    Megatron overlaps the gradient reduction with the last backward, which is then a real one.
    """
    ranks, stages = range(plan.limits.num_ranks), range(plan.limits.num_stages)
    losses = [len(plan.of_rank(rank, "B")) for rank in ranks]
    wanted = of_host(max(losses)) if of_host and plan.in_host_schedule else max(losses)
    dummies = tuple(MicroBatch((), (rank,)) for rank in ranks for _ in range(wanted - losses[rank]))
    if not dummies:
        return plan
    if plan.in_host_schedule:
        return replace(plan, micro_batches=dummies + plan.micro_batches)
    forward, backward = (range(n, n + len(dummies)) for n in (len(plan.micro_batches), len(plan.passes("B"))))
    front = (*(Op("F", i) for i in forward), *(Op("B", j) for j in backward))
    rows = plan.order or tuple(tuple(op for row in orders_of_stage(plan, s) for op in row) for s in stages)
    return check(
        replace(
            plan,
            micro_batches=plan.micro_batches + dummies,
            backward=plan.backward and plan.backward + dummies,
            # Dummies of a rank are all alike: none could be told from those that the plan has of its own.
            replayed=(*plan.replayed, *backward) if plan.backward else plan.replayed,
            order=tuple((*front, *row) for row in rows),
            recompute=tuple((*row, *(0 for _ in dummies)) for row in plan.recompute),
            offload=plan.offload and (*plan.offload, *(0.0 for _ in dummies)),
        )
    )


def _sum_gradients(chunk: Any, num_tokens: Tensor, whole: bool, groups: Any) -> None:
    """What the stock schedule does after its last backward."""
    config = get_model_config(chunk)
    if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.start_grad_sync(force_all_reduce=whole)
    if config.finalize_model_grads_func is not None:
        divisor = num_tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func([chunk], divisor, pg_collection=groups, force_all_reduce=whole)
