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

A call that cannot be planned runs as it would without evenload, which shows before its first micro-batch does; so do
all calls after it, where none has been planned.

Exact under both objectives of Megatron's: the sum of token losses, and the mean of micro-batch means (`objective`).
Samples are cut where packed attention can do what the layers' own does (`attention`); else they stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.routing import StepRouting
from ....runtime.world.agreement import all_or_none
from ...unmodified.planned_loop import PlannedLoop, leave
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
from .reading.taken import Taken, given_back, has_any, of_one, taken_from
from .refusals.layers import refuse_losses_of_rows, refuse_routers, why_together
from .refusals.supported import bare_model, refuse_loop, refuse_replays, warn_of_dropout
from .running.chunks import chunks_of, is_interleaved, of_stock, run_stock
from .running.experts import gate_of, routing_of
from .running.forward_step import UserStep
from .running.mtp import next_tokens
from .running.objective import Losses, MeanOfMeans
from .running.order import run_order
from .running.reports import Reports
from .running.trial import FunctionTrial, try_first


class PlannedSteps:
    """The planned training calls of one session."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._loops: WeakKeyDictionary[Any, UserLoop] = WeakKeyDictionary()
        self._together: WeakKeyDictionary[Any, Together] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Any, RowSteps] = WeakKeyDictionary()
        self._left: WeakSet[Any] = WeakSet()
        """Models, by their first chunk, whose loops run as they are."""
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
            if chunks[0] in self._left:
                return stock(*args, **call)
            if why := why_together(get_model_config(chunks[0]), pattern_of(unwrapped_chunk(chunks[0]))):
                return self._run_together(stock, foreign_owner, why, chunks, call)
            return self._run(stock, foreign_owner, chunks, call)

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
        together = self._together.get(chunks[0])
        try:
            if together is None:
                refuse_together(get_model_config(chunks[0]), why)
                together = Together.of(self._recipe, chunks, foreign_owner, why, call)
                self._together[chunks[0]] = together
            plan = together.plan(call)
        except EvenloadError as error:
            return self._leave(together.planning if together else None, error, stock, chunks, call)
        return together.run(stock, plan, chunks, call)

    def _run(self, stock: Callable[..., Any], foreign_owner: str, chunks: list[Any], call: dict[str, Any]) -> Any:
        """A training call whose samples are planned. What cannot be is found out before the first micro-batch runs, on
        all ranks: the loop's own batches run then in its own schedule."""
        planning: PlannedLoop | None = None
        taken: Taken | None = None
        try:
            loop = self._loop_of(chunks, foreign_owner, call)
            planning, taken = loop.planning, taken_from(call["data_iterator"], call["num_microbatches"])
            first = next(iter(taken.values()), [None])[0]
            if loop.source.all_have and holds_rows(first):
                if loop.one_context:
                    refuse_form("ragged rows")
                rows = self._rows_of(chunks[0])
                planning = rows.planning
                run = rows.prepared(stock, chunks, of_one(taken), call)
            else:
                run = _prepared(stock, loop, chunks, taken, call)
        except EvenloadError as error:
            if taken is not None:
                call = {**call, "data_iterator": given_back(call["data_iterator"], taken)}
            return self._leave(planning, error, stock, chunks, call)
        returned = run()
        end_of_check()
        return returned

    def _leave(
        self,
        planning: PlannedLoop | None,
        error: EvenloadError,
        stock: Callable[..., Any],
        chunks: list[Any],
        call: dict[str, Any],
    ) -> Any:
        """The training call as the loop means it; every one from now on, where none has been planned."""
        leave("Megatron-Core", planning, error)
        if planning is None or not planning.has_run:
            self._left.add(chunks[0])
        return stock(**call)

    def _loop_of(self, chunks: list[Any], foreign_owner: str, call: dict[str, Any]) -> UserLoop:
        """What is known of a model; in its first call found out. Collective then. Raises EvenloadError."""

        def check() -> None:
            refuse_loop(chunks[0], call)
            for chunk in chunks:
                refuse_routers(bare_model(chunk))

        if (known := self._loops.get(chunks[0])) is not None:
            refuse_loop(chunks[0], call)
            return known
        all_or_none(check)
        source = all_or_none(lambda: BatchSource(has_any(call["data_iterator"])))
        warn = not self._loops and dist.get_rank() == 0
        loop = all_or_none(lambda: UserLoop.of(self._recipe, chunks, foreign_owner, warn, source))
        warn_of_dropout(get_model_config(chunks[0]))
        self._loops[chunks[0]] = loop
        return loop

    def _rows_of(self, chunk: Any) -> RowSteps:
        """The planning of a model's calls on TensorDicts."""
        if chunk not in self._rows:
            chain = chain_of(self._recipe, bare_model(chunk), current_layout(), warn=dist.get_rank() == 0)
            self._rows[chunk] = RowSteps(chain)
        return self._rows[chunk]


@on_release
def release() -> None:
    """Make every wrapped function that a loop still holds the stock one again; for after the rows are off."""
    for steps in list(_all):
        steps.release()
    _all.clear()


_all: set[PlannedSteps] = set()
"""Those of the session that is on: kept here, for a loop need not keep the functions that it asked for."""


def _prepared(
    stock: Callable[..., Any], loop: UserLoop, chunks: list[Any], taken: Taken, call: dict[str, Any]
) -> Callable[[], Any]:
    """Runs a training call by its plan, and gives what the loss functions reported. Collective; raises EvenloadError
    where the call cannot be planned, on all ranks."""
    config, gpts = get_model_config(chunks[0]), [bare_model(chunk) for chunk in chunks]
    batches = loop.source.spread(taken)
    planned = plan_call(batches, loop, gpts[0], is_interleaved(chunks))
    if not planned.plan.in_host_schedule:
        if loop.only_stock is not None:
            raise EvenloadError(*loop.only_stock)
        refuse_replays(planned.plan, config)
    routing, gate = _experts(config, planned, batches)
    divisor = len(planned.plan.of_rank(data_rank())) if planned.plan.in_host_schedule else 1
    means = None if config.calculate_per_token_loss else MeanOfMeans(planned.weights, divisor, planned.cp_shards)
    further = next_tokens(batches.samples, planned.places, config, divisor) if config.mtp_num_layers else None
    reports, borders = Reports(planned.cp_shards, loop.kinds), batches.form.has_borders

    def step(reports: Reports, gate: ExpertGate | None, *, checks: bool = False) -> UserStep:
        losses = Losses(checks=checks, objective=means, reports=reports, further=further)
        return UserStep(call["forward_step_func"], gpts, planned.lay, losses, loop.by_token, borders, routing, gate)

    if not loop.planning.has_run:
        tried = step(Reports(planned.cp_shards), None, checks=True)
        try_first(chunks, partial(_run_planned, stock, loop, planned, tried, chunks, call))
    return partial(_run_reported, stock, loop, planned, batches, step(reports, gate), chunks, call)


def _run_reported(
    stock: Callable[..., Any],
    loop: UserLoop,
    planned: CallPlan,
    batches: Batches,
    step: UserStep,
    chunks: list[Any],
    call: dict[str, Any],
) -> Any:
    """A planned training call; its reports are those of the loop's own micro-batches."""
    returned = _run_planned(stock, loop, planned, step, chunks, call)
    warn_of_differences(loop, get_model_config(chunks[0]), planned, step, loop.planning.warned)
    loads = step.gate.loads if step.gate else ()
    loop.planning.report(planned.plan, micro_batch_size=batches.size, packed=planned.packed, loads=loads)
    if not parallel_state.is_pipeline_last_stage():
        return returned
    targets = [of_ranks[parallel_state.get_context_parallel_rank()] for of_ranks in batches.targets]
    reports = step.losses.reports
    returned = reports.of_loop(returned, planned.own, targets, data_group())
    loop.kinds = reports.kinds
    return returned


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
    call: dict[str, Any],
    trial: FunctionTrial | None = None,
) -> Any:
    """The plan of a training call, in Megatron's own schedule or in its own order, or a pack of it for a ``trial``;
    what the loss functions reported."""
    plan, one, config = planned.plan, loop.one_context, get_model_config(chunks[0])
    own = ("forward_step_func", "data_iterator", "num_microbatches")
    rest = {name: value for name, value in call.items() if name not in own}
    rest = one.of_schedule(rest) if one else rest
    with one.inside(step.gpts, config) if one else nullcontext():
        if trial is not None:
            number = of_stock(is_interleaved(chunks), config, 1)
            packs = [step.load(planned.two_whole(data_rank())) for _ in range(number)]
            return run_stock(stock, step, packs, chunks, trial, **rest | {"forward_only": True})
        if plan.in_host_schedule:
            packs = [step.load(plan.micro_batches[index]) for index in plan.of_rank(data_rank())]
            return run_stock(stock, step, packs, chunks, **rest)
        plane = loop.plane if plan.shared else None
        return run_order(plan, step, chunk=chunks[0], links=loop.links_for(plan), plane=plane, rest=rest)
