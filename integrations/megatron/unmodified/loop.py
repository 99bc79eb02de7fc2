"""evenload inside a Megatron-Core training loop that nobody edits.

    forward_backward = get_forward_backward_func()
    losses = forward_backward(forward_step_func=..., data_iterator=..., model=..., num_microbatches=..., ...)

The returned function is wrapped (the rows are in `patches.megatron`). In a training call it

    takes    this rank's batches from the user's iterator, or from the rank that has one, as samples (`batches`);
    plans    the samples of all data-parallel ranks as one global batch, and compares the plan on all ranks;
    sends    each sample to the rank that computes it;
    runs     a plan of whole samples without an order of its own in the stock schedule, any other in its own order
             (`order`). `forward_step_func` is called as before, takes a batch with its own keys, [1, T], and
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
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.routing import StepRouting
from ....runtime.world.agreement import all_or_none
from ...unmodified.planned_loop import Loops, LoopSession
from ...unmodified.planned_runs import end_of_check, on_release
from ..base.families import pattern_of, unwrapped_chunk
from ..base.plane import current_layout, open_plane, stage_links
from .planning.call_plan import CallPlan, data_group, plan_call, warn_of_differences
from .planning.fixed_micro_batches import FixedMicroBatchLoop
from .planning.rows import prepare_rows
from .planning.user_loop import UserLoop, chain_of
from .reading.batches import Batches, BatchSource
from .reading.context_parallel import data_rank, refuse_form
from .reading.rows import holds_rows
from .reading.taken import given_back, has_any, of_one, taken_from
from .refusals.layers import refuse_losses_of_rows, refuse_routers, why_together
from .refusals.supported import bare_model, refuse_loop, refuse_replays, warn_of_dropout
from .running.chunks import chunks_of, is_interleaved, required_microbatches, run_stock
from .running.experts import gate_of, routing_of
from .running.forward_step import UserStep
from .running.mtp import next_tokens
from .running.objective import Losses, MeanOfMeans
from .running.order import run_order
from .running.reports import Reports
from .running.trial import FunctionTrial, try_first
from .writers import MegatronSession


class PlannedSteps:
    """The planned training calls while one recipe is on."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._loops: Loops[UserLoop] = Loops()
        self._fixed: Loops[FixedMicroBatchLoop] = Loops()
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
            return stock(*args, **call) if chunks[0] in self._left else self._run(stock, foreign_owner, chunks, call)

        return forward_backward

    def release(self) -> None:
        """Every function made here is the stock one again, and the process groups made here are gone."""
        self.active = False
        self._loops.release()
        self._fixed.release()

    def _run(self, stock: Callable[..., Any], foreign_owner: str, chunks: list[Any], call: dict[str, Any]) -> Any:
        """A training call. What cannot be planned is found out before the first micro-batch runs, on all ranks: the
        loop's own batches run then in its own schedule, in every call from now on where none has been planned."""
        session: LoopSession = MegatronSession()
        try:
            if why := why_together(get_model_config(chunks[0]), pattern_of(unwrapped_chunk(chunks[0]))):
                session = fixed = self._fixed_loop_of(chunks, foreign_owner, why, call)
                run = fixed.prepared(stock, chunks, call)
            else:
                session = loop = self._loop_of(chunks, foreign_owner, call)
                taken = taken_from(call["data_iterator"], call["num_microbatches"])
                call = {**call, "data_iterator": given_back(call["data_iterator"], taken)}
                if loop.source.all_have and holds_rows(next(iter(taken.values()), [None])[0]):
                    if loop.one_context:
                        refuse_form("ragged rows")
                    session = loop.rows = loop.rows or self._rows_of(chunks[0])
                    run = prepare_rows(session, stock, chunks, of_one(taken), call)
                else:
                    batches = loop.source.broadcast_batches(taken)
                    planned = plan_call(batches, loop, bare_model(chunks[0]), is_interleaved(chunks))
                    run = PlannedCall(stock, loop, chunks, call, batches, planned).prepared()
        except EvenloadError as error:
            session.leave(error)
            if not session.has_run:
                self._left.add(chunks[0])
            return stock(**call)
        returned = run()
        end_of_check()
        return returned

    def _fixed_loop_of(
        self, chunks: list[Any], foreign_owner: str, why: str, call: dict[str, Any]
    ) -> FixedMicroBatchLoop:
        """What is known of a model whose micro-batches stay as they are. Collective in its first call; raises
        EvenloadError."""
        if chunks[0] not in self._fixed:
            self._fixed[chunks[0]] = FixedMicroBatchLoop.of(self._recipe, chunks, foreign_owner, why, call)
        return self._fixed[chunks[0]]

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

    def _rows_of(self, chunk: Any) -> MegatronSession:
        """The session of a model's calls on TensorDicts."""
        chain = chain_of(self._recipe, bare_model(chunk), current_layout(), warn=dist.get_rank() == 0)
        return MegatronSession(planners=chain)


@on_release
def release() -> None:
    """Make every wrapped function that a loop still holds the stock one again; for after the rows are off."""
    for steps in list(_all):
        steps.release()
    _all.clear()


_all: set[PlannedSteps] = set()
"""Those of the session that is on: kept here, for a loop need not keep the functions that it asked for."""


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """A training call of Megatron's schedule, and the plan of its samples."""

    stock: Callable[..., Any]
    loop: UserLoop
    chunks: Sequence[Any]
    call: dict[str, Any]
    batches: Batches
    planned: CallPlan

    def prepared(self) -> Callable[[], Any]:
        """Runs the call by its plan, and gives what the loss functions reported. Collective; raises EvenloadError where
        the call cannot be planned, on all ranks."""
        config, gpts = get_model_config(self.chunks[0]), [bare_model(chunk) for chunk in self.chunks]
        loop, planned, batches = self.loop, self.planned, self.batches
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
            function = self.call["forward_step_func"]
            return UserStep(function, gpts, planned.lay, losses, loop.by_token, borders, routing, gate)

        if not loop.has_run:
            try_first(self.chunks, partial(self._run, step(Reports(planned.cp_shards), None, checks=True)))
        return partial(self._run_reported, step(reports, gate))

    def _run_reported(self, step: UserStep) -> Any:
        """The plan of the call; its reports are those of the loop's own micro-batches."""
        loop, planned, batches = self.loop, self.planned, self.batches
        returned = self._run(step)
        warn_of_differences(loop, get_model_config(self.chunks[0]), planned, step, loop.warned)
        loads = step.gate.loads if step.gate else ()
        loop.report(planned.plan, micro_batch_size=batches.size, packed=planned.packed, loads=loads)
        if not parallel_state.is_pipeline_last_stage():
            return returned
        targets = [of_ranks[parallel_state.get_context_parallel_rank()] for of_ranks in batches.targets]
        reports = step.losses.reports
        returned = reports.of_loop(returned, planned.own, targets, data_group())
        loop.kinds = reports.kinds
        return returned

    def _run(self, step: UserStep, trial: FunctionTrial | None = None) -> Any:
        """The plan of the call, in Megatron's own schedule or in its own order, or a pack of it for a ``trial``; what
        the loss functions reported."""
        plan, one, chunks = self.planned.plan, self.loop.one_context, self.chunks
        config = get_model_config(chunks[0])
        own = ("forward_step_func", "data_iterator", "num_microbatches")
        rest = {name: value for name, value in self.call.items() if name not in own}
        rest = one.of_schedule(rest) if one else rest
        with one.inside(step.gpts, config) if one else nullcontext():
            if trial is not None:
                number = required_microbatches(is_interleaved(chunks), config, 1)
                packs = [step.load(self.planned.two_whole(data_rank())) for _ in range(number)]
                return run_stock(self.stock, step, packs, chunks, trial, **rest | {"forward_only": True})
            if plan.in_host_schedule:
                packs = [step.load(plan.micro_batches[index]) for index in plan.of_rank(data_rank())]
                return run_stock(self.stock, step, packs, chunks, **rest)
            plane = self.loop.plane_of(plan, open_plane)
            links = self.loop.group(stage_links) if plan.limits.num_stages > 1 else None
            return run_order(plan, step, chunk=chunks[0], links=links, plane=plane, rest=rest)


def _experts(config: Any, planned: CallPlan, batches: Batches) -> tuple[StepRouting | None, ExpertGate | None]:
    """What layers with experts know of a training call; a dense model has neither."""
    if not config.num_moe_experts:
        return None, None
    refuse_losses_of_rows(config, batches.form.has_borders)
    plan = planned.plan
    return routing_of(config, plan.lengths, planned.stock_micro_batches, len(batches.lengths)), gate_of(plan)
