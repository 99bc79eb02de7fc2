"""evenload inside Transformers' Trainer, in scripts that nobody edits: also TRL's SFTTrainer, PEFT, LLaMA-Factory.

    batches, num_items = trainer.get_batch_samples(epoch_iterator, num_batches, device)
    for inputs in batches:
        loss = trainer.training_step(model, inputs, num_items)

Two methods of the Trainer are wrapped (the rows are in `patches.transformers`). ``get_batch_samples`` takes the batches
of one optimizer step; there the samples of all ranks are planned as one global batch. The script's batches go on
through the Trainer's loop as they are, so that its counts, callbacks and logs do not change. The last ``training_step``
of the step runs the plan: each of its forwards and backwards is the Trainer's own ``training_step`` on a pack, whose
``accelerator.backward`` waits for its turn. The others run nothing.

Exact where the Trainer sums token losses and divides by ``num_items_in_batch``, which counts the targets of all ranks;
`supported` refuses what does not. All ranks run the same sequence of forwards and backwards, because parameters (FSDP,
ZeRO 3) and metrics (TRL) are gathered in every one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.in_step import Program, dummy
from ...core.plan.program import lower
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain, warn_once
from ...core.recipe.recipe import Recipe
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.executor import Executor
from ...runtime.world.agreement import agree, place
from ...runtime.world.plane import Plane
from ..host import no_mark
from ..planned_runs import end_of_check, on_release, report_idle, report_step
from . import attention
from .inside import inside
from .planning import GlobalBatch, chain_of, gather, recipe_for
from .proof import prove_trainer, windows
from .stage import Samples, TrainerStage
from .supported import inner_model, refuse_trainer, warn_of_dropout

log = logging.getLogger("evenload")

NAME = "Transformers' Trainer"
"""What users call the loop."""


@dataclass(eq=False)
class PlannedTrainer:
    """What evenload keeps for one Trainer."""

    chain: PlanChain | None
    """None: its batches stay as they are."""
    plane: Plane | None = None
    """What ranks share micro-batches over; made for the first plan that shares one."""
    step: int = 0
    batches: list[Any] = field(default_factory=list)
    """Of the step that runs, as the script made them; the Trainer hands them on one by one."""
    batch: GlobalBatch | None = None
    """The samples of that step, until they have run."""
    plan: StepPlan | None = None
    warned: set[str] = field(default_factory=set)


_planned: WeakKeyDictionary[Any, PlannedTrainer] = WeakKeyDictionary()


def get_batch_samples(wrapped: Any, trainer: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Trainer.get_batch_samples`, whose batches are planned as one global batch; returns what the stock one does."""
    with inside():
        batches, num_items = wrapped(*args, **kwargs)
    if not batches:
        return batches, num_items
    state = _planned.get(trainer)
    if state is None:
        recipe = recipe_for(trainer, recipe)
        if not recipe.enabled():
            return batches, num_items
        refuse_trainer(trainer, num_items)
    elif state.chain is None:
        return batches, num_items
    else:
        _refuse_unfinished(state, trainer)
    batch = gather(batches, num_items, inner_model(trainer).config)
    state = state or _opened(trainer, recipe, batch, batches[0], num_items)
    if state.chain is None:
        return batches, num_items
    state.batch = batch
    state.plan = state.chain.plan(state.batch.lengths)
    state.batches = list(batches)
    state.step += 1
    if place()[0] == 0:
        warn_once(state.plan, state.warned)
    agree(state.plan.digest, "plans", state.step)
    report_step(NAME, state.chain, state.plan)
    _log_step(state, batches)
    return batches, num_items


def _opened(trainer: Any, recipe: Recipe, batch: GlobalBatch, row: Any, num_items: Any) -> PlannedTrainer:
    """What evenload keeps for a Trainer, whose packs are measured now; one that fails stays as it is. Collective."""
    proof = prove_trainer(trainer, windows([*batch.own.values()]), row, num_items)
    if proof.fault is not None:
        report_idle(NAME, f"{proof.fault.what} ({proof.fault.found})", proof.fault.do)
        state = PlannedTrainer(None)
    else:
        warn_of_dropout(trainer.model)
        state = PlannedTrainer(chain_of(recipe, trainer, whole=not proof.may_cut))
    _planned[trainer] = state
    return state


def training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    """`Trainer.training_step`: the last one of a planned step runs its plan, those before it nothing."""
    with inside():
        return _training_step(wrapped, trainer, args, kwargs)


def _training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    state = _planned.get(trainer)
    call = dict(zip(("model", "inputs", "num_items_in_batch"), args, strict=False)) | kwargs
    if state is None or not any(call["inputs"] is batch for batch in state.batches):
        return wrapped(*args, **kwargs)
    if call["inputs"] is not state.batches[-1]:
        return torch.zeros((), device=trainer.args.device)
    assert state.plan is not None
    assert state.batch is not None
    model, num_items = call["model"], call.get("num_items_in_batch")
    loss = _run(state, trainer, model, lambda batch: wrapped(model, batch, num_items))
    state.batches, state.batch, state.plan = [], None, None
    end_of_check()
    return loss


@on_release
def release() -> None:
    """Forget every Trainer; for after the rows are off."""
    for state in _planned.values():
        if state.plane is not None:
            state.plane.close()
    _planned.clear()


def _run(state: PlannedTrainer, trainer: Any, model: Any, call: Any) -> Tensor:
    """All passes of this rank in a step; the loss that the Trainer books for it."""
    plan, batch = state.plan, state.batch
    assert plan is not None
    assert batch is not None
    rank, size = place()
    if plan.shared and state.plane is None:
        state.plane = Plane.make([tuple(range(size))], plan.limits.node_ranks)
    plane = state.plane if plan.shared else None
    program = _closed(plan, rank)
    samples = batch.exchange(plan)
    stage = TrainerStage(
        trainer,
        model,
        call,
        samples=Samples(lambda i: samples[i][0], lambda i: samples[i][1]),
        plane=plane,
        num_backwards=sum(action.kind == "backward" for action in program),
        with_mask=batch.has_mask,
    )
    clock = BusyClock(stage.device)
    with _attention(inner_model(trainer)):
        Executor(plan, 0, rank, program, stage, links=None, plane=plane, clock=clock, mark=no_mark).run()
    return stage.loss


def _closed(plan: StepPlan, rank: int) -> Program:
    """The program of a rank in step with all others, ending on every rank with a forward and its own backward: DDP and
    FSDP prepare the gradient sum in the forward of the backward that does it."""
    ends = [lower(plan, 0, r, "in step")[-2:] for r in range(plan.limits.num_ranks)]
    program = lower(plan, 0, rank, "in step")
    if all(len(end) == 2 and end[0].kind == "forward" and end[0].graph == end[1].graph for end in ends):
        return program
    graph = max((action.graph for action in program), default=-1) + 1
    return (*program, dummy("forward", graph), dummy("backward", graph))


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """The model attends inside packs; afterwards as it came."""
    stock = model.config._attn_implementation
    model.set_attn_implementation(attention.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(stock)


def _log_step(state: PlannedTrainer, batches: list[Any]) -> None:
    plan, rank = state.plan, place()[0]
    assert plan is not None
    own = [plan.micro_batches[index] for index in plan.of_rank(rank)]
    log.info(
        "step %d: %d samples in %d micro-batches, %d of them shared by ranks, %d samples cut; %d tokens on this rank "
        "instead of %d",
        state.step,
        len(plan.lengths),
        len(plan.micro_batches),
        sum(len(micro_batch.ranks) > 1 for micro_batch in plan.micro_batches),
        len(plan.cut),
        sum(-(-micro_batch.num_padded_tokens // len(micro_batch.ranks)) for micro_batch in own),
        sum(batch["input_ids"].numel() for batch in batches),
    )


def _refuse_unfinished(state: PlannedTrainer, trainer: Any) -> None:
    if state.batch is not None:
        raise EvenloadError(
            "the batches of a planned step did not come to Trainer.training_step",
            f"{type(trainer).__name__} ran step {state.step} without it, unplanned",
            "call super().training_step(model, inputs, num_items_in_batch) with the batch as it is, or leave evenload "
            "off",
        )
