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

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ....core.aliases import Floats
from ....core.errors import EvenloadError
from ....core.plan.step_plan import StepPlan, as_lengths
from ....core.plan.token_layout import tokens_of_ranks
from ....core.planning.chain import PlanChain, warn_once
from ....core.recipe.recipe import Recipe
from ....runtime.attributes import with_attributes
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.history import learned
from ....runtime.experts.routing import StepRouting
from ....runtime.stage.stage_links import StageLinks
from ....runtime.world.agreement import agree, everyone
from ....runtime.world.plane import Plane
from ...planned_runs import end_of_check, report_step
from ..model.linears import why_in_backward
from ..plane import current_layout, open_plane, stage_links
from .attention import why_whole
from .batches import Batches, Source
from .expert_rules import refuse_experts, refuse_losses_of_rows, refuse_routers, why_together
from .experts import CameWith, gate_of, routing_of, with_experts_in_step
from .forms.rows import holds_rows
from .forward_step import UserStep
from .objective import MeanOfMeans, weights_of
from .order import LayOut, run_order, with_dummies
from .ranks.context_parallel import Columns, OneContextRank, data_rank, refuse_other_forms, refuse_together
from .ranks.sharing import plan_in_rounds, ranks_of_samples
from .reports import Kinds, Reports
from .rows import RowSteps
from .samples import UserPack, exchange, lay_out
from .stock.chunks import chunks_of, is_interleaved, known_shapes, of_stock, one_iterator, refuse_chunks_with_copies
from .stock.mtp import next_tokens
from .supported import (
    Trouble,
    bare_model,
    for_config,
    refuse_loop,
    refuse_replays,
    tokens_multiple,
    warn_of_dropout,
    why_stock,
)
from .together import Together

log = logging.getLogger("evenload")


@dataclass(eq=False)
class _Loop:
    """What is known of a user's model between its training calls."""

    chain: PlanChain
    by_token: bool
    """Its packs may hold parts of samples."""
    only_stock: Trouble | None
    """Why Megatron's own schedule must run its plans."""
    source: Source
    kinds: Kinds | None = None
    """What the values of its reports are, after the first call."""
    one_context: OneContextRank | None = None
    """What stands in for Megatron's context parallelism in a training call."""
    links: StageLinks | None = None
    """To the neighbouring pipeline stages, from the first plan on that has an order."""
    plane: Plane | None = None
    """Of the ranks that may share samples, from the first plan on that shares one."""

    def plane_of(self, plan: StepPlan) -> Plane | None:
        """What a plan's micro-batches are shared over; None where it shares none. Collective."""
        if not plan.shared:
            return None
        self.plane = self.plane or open_plane()
        self.plane.node_ranks = plan.limits.node_ranks
        return self.plane


class _Planned(NamedTuple):
    """The plan of a training call, and what this rank knows of its samples."""

    plan: StepPlan
    lay: LayOut
    columns: Columns
    own: list[list[int]]
    """The columns that this rank has, in the stock loop, of each of the loop's own micro-batches."""
    order: list[tuple[int, int, int]]
    """(data rank, micro-batch, row) of each sequence."""
    weights: Floats
    """Of a token of each column, where micro-batches are averaged."""
    came_with: CameWith


class PlannedSteps:
    """The planned training calls of one session."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._loops: WeakKeyDictionary[Any, _Loop] = WeakKeyDictionary()
        self._together: WeakKeyDictionary[Any, Together] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Any, RowSteps] = WeakKeyDictionary()
        self._step = 0
        self._warned: set[str] = set()
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
            if why := why_together(get_model_config(chunks[0])):
                return self._run_together(stock, foreign_owner, why, chunks, call)
            return self._run(stock, foreign_owner, **call)

        return forward_backward

    def release(self) -> None:
        """Every function made here is the stock one again, and the process groups made here are gone."""
        self.active = False
        groups: list[Any] = [one for loop in self._loops.values() for one in (loop.links, loop.plane, loop.one_context)]
        groups += [loop.links for loop in self._together.values()]
        for each in filter(None, groups):
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
        if taken and holds_rows(taken[0]):
            if loop.one_context:
                refuse_other_forms("ragged rows")
            return self._run_rows(stock, forward_step_func, chunks, gpts[0], taken, rest)
        batches = loop.source.spread(taken)
        planned = self._plan(batches, loop, gpts[0], is_interleaved(chunks))
        plan = planned.plan
        own = plan.of_rank(data_rank())
        routing, gate = _routing(config, planned, batches)
        means = not config.calculate_per_token_loss
        divisor = len(own) if plan.in_host_schedule else 1
        step = UserStep(
            forward_step_func,
            gpts,
            by_token=loop.by_token,
            checks=first,
            has_borders=batches.form.has_borders,
            routing=routing,
            gate=gate,
            objective=MeanOfMeans(planned.weights, divisor, planned.columns) if means else None,
            reports=(reports := Reports(planned.columns, loop.kinds)),
            further=next_tokens(batches.samples, planned.order, config, divisor) if config.mtp_num_layers else None,
        )
        returned = _run_planned(stock, loop, planned, step, chunks, gpts, {"model": model, **rest})
        report_step("Megatron-Core", loop.chain, plan, micro_batch_size=batches.size)
        loop.chain = learned(loop.chain, gate.loads if gate else ())
        end_of_check()
        if not parallel_state.is_pipeline_last_stage():
            return returned
        targets = [of_ranks[parallel_state.get_context_parallel_rank()] for of_ranks in batches.targets]
        returned = reports.of_loop(returned, planned.own, targets, _data_group())
        loop.kinds = reports.kinds
        return returned

    def _loop_of(self, chunks: list[Any], gpts: list[Any], foreign_owner: str, data_iterator: Any) -> _Loop:
        """What is known of a model; in its first call found out. Collective then. Raises EvenloadError."""
        if gpts[0] not in self._loops:
            warn_of_dropout(get_model_config(chunks[0]))
            for gpt in gpts:
                refuse_routers(gpt)
            warn = not self._loops and dist.get_rank() == 0
            self._loops[gpts[0]] = _loop(self._recipe, chunks, gpts, foreign_owner, warn, Source(data_iterator))
        return self._loops[gpts[0]]

    def _run_rows(
        self, stock: Callable[..., Any], function: Any, chunks: list[Any], gpt: Any, taken: list[Any], rest: Any
    ) -> list[Any]:
        """A training call on TensorDicts."""
        if gpt not in self._rows:
            layout, warn = current_layout(), dist.get_rank() == 0
            recipe = for_config(self._recipe, get_model_config(gpt), gpt.vocab_size, layout)
            self._rows[gpt] = RowSteps(PlanChain.of_loop(recipe, layout, warn=warn))
        steps = self._rows[gpt]
        reports, plan = steps.run(stock, function, chunks, taken, **rest)
        report_step("Megatron-Core", steps.chain, plan, micro_batch_size=len(taken[0]))
        end_of_check()
        return reports

    def _plan(self, batches: Batches, loop: _Loop, gpt: Any, interleaved: bool) -> _Planned:
        try:
            return self._plan_step(batches, loop, gpt, interleaved)
        except EvenloadError:
            if loop.only_stock is not None and any(plugin.orders for plugin, _ in loop.chain.links):
                raise EvenloadError(*loop.only_stock) from None  # why samples had to stay whole
            raise

    def _plan_step(self, batches: Batches, loop: _Loop, gpt: Any, interleaved: bool) -> _Planned:
        """The plan of one step, with as many micro-batches on this rank as on every other, and how this rank lays one
        of them out. Collective."""
        group, ranks = _data_group(), parallel_state.get_context_parallel_world_size()
        me, place_in_row = dist.get_rank(group), parallel_state.get_context_parallel_rank()
        # Context-parallel ranks are given the same samples: the first brings them.
        brought = batches.lengths if place_in_row == 0 else [[] for _ in batches.lengths]
        gathered = everyone((brought, batches.targets, batches.row), group)
        lengths_of_ranks, targets_of_ranks, rows = zip(*gathered, strict=True)
        # The global batch in the order of Megatron's sampler: micro-batch by micro-batch, rank by rank.
        order = [
            (rank, place, row)
            for place in range(max(map(len, lengths_of_ranks)))
            for rank, one in enumerate(lengths_of_ranks)
            for row in range(len(one[place]) if place < len(one) else 0)
        ]
        lengths = [lengths_of_ranks[rank][place][row] for rank, place, row in order]
        own = {i: batches.samples[place][row] for i, (rank, place, row) in enumerate(order) if rank == me}
        plan = plan_in_rounds(loop.chain, as_lengths(lengths))
        if dist.get_rank() == 0:
            warn_once(plan, self._warned)
        agree(plan.digest, "plans", self._step)
        self._step += 1

        plan = with_dummies(plan, partial(of_stock, interleaved, gpt.config))
        like = batches.samples[0][0]
        samples = exchange(own, [rank for rank, _, _ in order], ranks_of_samples(plan), lengths, group, like=like)
        config = gpt.config
        lay = partial(
            lay_out,
            samples=samples,
            like=like,
            multiple=tokens_multiple(config),
            plane=loop.plane_of(plan),
            form=batches.form,
            device=next(gpt.parameters()).device,
        )
        slots = [tokens_of_ranks(plan.micro_batches[index])[me] for index in plan.of_rank(me)]
        log.info(
            "step %d: %d samples in %d micro-batches of %d tokens at most; %d tokens on this rank instead of %d",
            self._step,
            len(order),
            len(slots),
            max(slots),
            sum(slots),
            batches.slots,
        )
        columns = Columns(ranks, [rows[rank] for rank, _, _ in order])
        places: list[list[int]] = [[] for _ in batches.lengths]
        for i, (rank, place, _) in enumerate(order):
            if rank == me - place_in_row:
                places[place].append(columns.number(i, place_in_row))
        came_with = [lengths_of_ranks[rank][place] for rank, place, _ in order]
        return _Planned(plan, lay, columns, places, order, weights_of(targets_of_ranks, order), came_with)


def release() -> None:
    """Make every wrapped function that a loop still holds the stock one again; for after the rows are off."""
    for steps in list(_all):
        steps.release()
    _all.clear()


_all: set[PlannedSteps] = set()
"""Those of the session that is on: kept here, for a loop need not keep the functions that it asked for."""


def _loop(
    recipe: Recipe, chunks: Sequence[Any], gpts: Sequence[Any], foreign_owner: str, warn: bool, source: Source
) -> _Loop:
    stock, gpt, config = current_layout(), gpts[0], get_model_config(chunks[0])
    layout = replace(stock, cp=1, dp=stock.dp * stock.cp)
    shares = any(plugin.shares for plugin in recipe.enabled())
    # A stage may hold what others do not, and all of them must make one plan.
    own = [(why_stock(chunks, foreign_owner), why_whole(gpt, shares=shares), why_in_backward(gpt)) for gpt in gpts]
    reasons = [one for rank in everyone(own) for one in rank]
    only_stock, borders, together = (next(filter(None, one), one[0]) for one in zip(*reasons, strict=True))
    whole = only_stock is not None or bool(borders)
    if whole and warn:
        why = borders or (only_stock and " ".join(only_stock[:2]))
        log.warning("no sample is cut in this loop: %s", why)
    planned, in_step = with_experts_in_step(layout, config)
    chain = PlanChain.of_loop(for_config(recipe, config, gpt.vocab_size, planned), planned, warn=warn, whole=whole)
    if together and warn:
        log.info("weight gradients stay in the backward: %s", together)
    if chain.of_layers and layout.ep > 1:
        refuse_chunks_with_copies(gpts)
        refuse_experts(gpt)
    splits = chain.limits.splits_backward and not together
    chain = replace(chain, limits=replace(chain.limits, splits_backward=splits, in_step=in_step))
    return _Loop(chain, not borders, only_stock, source, one_context=OneContextRank() if stock.cp > 1 else None)


def _data_group() -> Any:
    """All data x context ranks with the same part of the model."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _routing(config: Any, planned: _Planned, batches: Batches) -> tuple[StepRouting | None, ExpertGate | None]:
    """What layers with experts know of a step, in a model that has some."""
    if not config.num_moe_experts:
        return None, None
    refuse_losses_of_rows(config, batches.form.has_borders)
    plan = planned.plan
    return routing_of(config, plan.lengths, planned.came_with, len(batches.lengths)), gate_of(plan)


def _run_planned(
    stock: Callable[..., Any],
    loop: _Loop,
    planned: _Planned,
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
            packs = [planned.lay(plan.micro_batches[index]) for index in plan.of_rank(data_rank())]
            return _run_stock(stock, step, packs, chunks, **rest)
        return _run_order(plan, loop, chunk=chunks[0], gpt=gpts[0], step=step, lay=planned.lay, rest=rest)


def _run_stock(
    stock: Callable[..., Any], step: UserStep, packs: list[UserPack], chunks: Sequence[Any], **rest: Any
) -> Any:
    """Megatron's own schedule over packs."""
    config, interleaved = get_model_config(chunks[0]), is_interleaved(chunks)
    coming = {id(chunk): iter(packs) for chunk in chunks}

    def forward_step(_: Any, chunk: Any, *more: Any) -> tuple[Any, Any]:
        if step.gate:
            step.gate.enter("a micro-batch")
        return step.run(next(coming[id(chunk)]), chunk, *more)

    shapes = known_shapes(packs, config, len(chunks)) if interleaved else nullcontext()
    iterators = [None] * len(chunks) if interleaved else None
    with with_attributes(config, variable_seq_lengths=True), shapes, step.listening():
        return stock(forward_step_func=forward_step, data_iterator=iterators, num_microbatches=len(packs), **rest)


def _run_order(plan: StepPlan, loop: _Loop, *, chunk: Any, **call: Any) -> list[Any]:
    """The order of a plan, in place of Megatron's schedule; `run_order` has the arguments. Raises EvenloadError."""
    if loop.only_stock is not None:
        raise EvenloadError(*loop.only_stock)
    refuse_replays(plan, get_model_config(chunk))
    if loop.links is None and plan.limits.num_stages > 1:
        loop.links = stage_links()
    return run_order(plan, chunk=chunk, links=loop.links, plane=loop.plane if plan.shared else None, **call)
