"""evenload inside a Megatron-Core training loop that nobody edits.

    forward_backward = get_forward_backward_func()
    losses = forward_backward(forward_step_func=..., data_iterator=..., model=..., num_microbatches=..., ...)

The returned function is wrapped (the rows are in `patches.megatron`). In a training call it

    takes    this rank's batches from the user's iterator, or from the rank that has one, as samples (`batches`);
    plans    the samples of all data-parallel ranks as one global batch, and compares the plan on all ranks;
    sends    each sample to the rank that computes it;
    runs     a plan of whole samples without an order of its own in the stock schedule, any other in its own order
             (`order`). `forward_step_func` is called as ever, takes a batch with its own keys, [1, T], and
             calls the model, which learns what is in the pack by a forward pre-hook (`forward_step`);
    reports  what the loss functions reported, for each micro-batch of the loop as far as it is known (`reports`).

Every rank runs the same number of micro-batches, filled up with dummies of one token, so that a collective in the
user's loss function still finds its partners. Planning is in line: to plan ahead, the next step's batches would have to
be taken from an iterator that the user may share, save or stop.

Exact under both objectives of Megatron's: the sum of token losses, and the mean of micro-batch means (`objective`).
Samples are cut where packed attention can do what the layers' own does (`attention`); else they stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.routing import StepRouting
from ...unmodified.planned_runs import end_of_check, on_release
from ..base.families import pattern_of, unwrapped_chunk
from ..base.plane import current_layout
from .planning.call_plan import CallPlan, data_group, plan_call, warn_of_differences
from .planning.fixed_micro_batches import Together
from .planning.rows import RowSteps
from .planning.user_loop import UserLoop, chain_of
from .reading.batches import Batches, BatchSource
from .reading.context_parallel import data_rank, refuse_form, refuse_together
from .reading.rows import holds_rows
from .refusals.layers import refuse_losses_of_rows, refuse_routers, why_together
from .refusals.supported import bare_model, refuse_loop, refuse_replays, warn_of_dropout
from .running.chunks import chunks_of, is_interleaved, one_iterator, run_stock
from .running.experts import gate_of, routing_of
from .running.forward_step import UserStep
from .running.mtp import next_tokens
from .running.objective import Losses, MeanOfMeans
from .running.order import run_order
from .running.reports import Reports


class PlannedSteps:
    """The planned training calls of one session."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._loops: WeakKeyDictionary[Any, UserLoop] = WeakKeyDictionary()
        self._together: WeakKeyDictionary[Any, Together] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Any, RowSteps] = WeakKeyDictionary()
        self.active = True
        _all.add(self)

    def around(self, stock: Callable[..., Any], foreign_owner: str = "") -> Callable[..., Any]:
        """What `get_forward_backward_func` gives to its caller in place of ``stock``. ``foreign_owner``: who made
        ``stock``, if not Megatron-Core; no order of a plan can take the place of that."""

        @wraps(stock)
        def forward_backward(*args: Any, **call: Any) -> Any:
            if not self.active or call.get("forward_only"):
                return stock(*args, **call)
            chunks = chunks_of(call["model"])
            if why := why_together(get_model_config(chunks[0]), pattern_of(unwrapped_chunk(chunks[0]))):
                return self._run_together(stock, foreign_owner, why, chunks, call)
            return self._run(stock, foreign_owner, **call)

        return forward_backward

    def release(self) -> None:
        """Every function made here is the stock one again, and the process groups made here are gone."""
        self.active = False
        groups: list[Any] = [*self._loops.values(), *(loop.links for loop in self._together.values() if loop.links)]
        for each in groups:
            if dist.is_initialized():
                each.close()
        self._loops.clear()
        self._together.clear()

    def _run_together(
        self, stock: Callable[..., Any], foreign_owner: str, why: str, chunks: list[Any], call: dict[str, Any]
    ) -> Any:
        """A training call whose micro-batches stay as they are."""
        refuse_together(get_model_config(chunks[0]), why)
        if chunks[0] not in self._together:
            self._together[chunks[0]] = Together.of(self._recipe, chunks, foreign_owner, why, call)
        return self._together[chunks[0]].run(stock, chunks, call)

    def _run(
        self,
        stock: Callable[..., Any],
        foreign_owner: str,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **rest: Any,
    ) -> Any:
        data_iterator, chunks = one_iterator(data_iterator), chunks_of(model)
        refuse_loop(chunks[0], rest)
        gpts, config = [bare_model(chunk) for chunk in chunks], get_model_config(chunks[0])
        first = gpts[0] not in self._loops
        loop = self._loop_of(chunks, gpts, foreign_owner, data_iterator)
        taken = None if data_iterator is None else [next(data_iterator) for _ in range(num_microbatches)]
        if taken and loop.source.all_have and holds_rows(taken[0]):
            if loop.one_context:
                refuse_form("ragged rows")
            return self._run_rows(stock, forward_step_func, chunks, gpts[0], taken, rest)
        batches = loop.source.spread(taken)
        planned = plan_call(batches, loop, gpts[0], is_interleaved(chunks))
        plan = planned.plan
        own = plan.of_rank(data_rank())
        routing, gate = _experts(config, planned, batches)
        means = not config.calculate_per_token_loss
        divisor = len(own) if plan.in_host_schedule else 1
        losses = Losses(
            checks=first,
            objective=MeanOfMeans(planned.weights, divisor, planned.cp_shards) if means else None,
            reports=(reports := Reports(planned.cp_shards, loop.kinds)),
            further=next_tokens(batches.samples, planned.places, config, divisor) if config.mtp_num_layers else None,
        )
        borders = batches.form.has_borders
        step = UserStep(forward_step_func, gpts, planned.lay, losses, loop.by_token, borders, routing, gate)
        returned = _run_planned(stock, loop, planned, step, chunks, gpts, {"model": model, **rest})
        warn_of_differences(loop, config, planned, step, loop.planning.warned)
        loop.planning.report(plan, micro_batch_size=batches.size, loads=gate.loads if gate else ())
        end_of_check()
        if not parallel_state.is_pipeline_last_stage():
            return returned
        targets = [of_ranks[parallel_state.get_context_parallel_rank()] for of_ranks in batches.targets]
        returned = reports.of_loop(returned, planned.own, targets, data_group())
        loop.kinds = reports.kinds
        return returned

    def _loop_of(self, chunks: list[Any], gpts: list[Any], foreign_owner: str, data_iterator: Any) -> UserLoop:
        """What is known of a model; in its first call found out. Collective then. Raises EvenloadError."""
        if gpts[0] not in self._loops:
            warn_of_dropout(get_model_config(chunks[0]))
            for gpt in gpts:
                refuse_routers(gpt)
            warn = not self._loops and dist.get_rank() == 0
            self._loops[gpts[0]] = UserLoop.of(
                self._recipe, chunks, gpts, foreign_owner, warn, BatchSource(data_iterator)
            )
        return self._loops[gpts[0]]

    def _run_rows(
        self, stock: Callable[..., Any], function: Any, chunks: list[Any], gpt: Any, taken: list[Any], rest: Any
    ) -> list[Any]:
        """A training call on TensorDicts."""
        if gpt not in self._rows:
            chain = chain_of(self._recipe, gpt, current_layout(), warn=dist.get_rank() == 0)
            self._rows[gpt] = RowSteps(chain)
        reports = self._rows[gpt].run(stock, function, chunks, taken, **rest)
        end_of_check()
        return reports


@on_release
def release() -> None:
    """Make every wrapped function that a loop still holds the stock one again; for after the rows are off."""
    for steps in list(_all):
        steps.release()
    _all.clear()


_all: set[PlannedSteps] = set()
"""Those of the session that is on: kept here, for a loop need not keep the functions that it asked for."""


def _experts(config: Any, planned: CallPlan, batches: Batches) -> tuple[StepRouting | None, ExpertGate | None]:
    """What layers with experts know of a training call; a dense model has neither."""
    if not config.num_moe_experts:
        return None, None
    refuse_losses_of_rows(config, batches.form.has_borders)
    plan = planned.plan
    return routing_of(config, plan.lengths, planned.came_with, len(batches.lengths)), gate_of(plan)


def _run_planned(
    stock: Callable[..., Any],
    loop: UserLoop,
    planned: CallPlan,
    step: UserStep,
    chunks: Sequence[Any],
    gpts: Sequence[Any],
    rest: dict[str, Any],
) -> Any:
    """The plan of a training call, in Megatron's own schedule or in its own order; what the loss functions reported."""
    plan, one = planned.plan, loop.one_context
    rest = one.of_schedule(rest) if one else rest
    with one.inside(gpts, get_model_config(chunks[0])) if one else nullcontext():
        if plan.in_host_schedule:
            packs = [step.load(plan.micro_batches[index]) for index in plan.of_rank(data_rank())]
            return run_stock(stock, step, packs, chunks, **rest)
        if loop.only_stock is not None:
            raise EvenloadError(*loop.only_stock)
        refuse_replays(plan, get_model_config(chunks[0]))
        plane = loop.plane if plan.shared else None
        return run_order(plan, step, chunk=chunks[0], links=loop.links_for(plan), plane=plane, rest=rest)
