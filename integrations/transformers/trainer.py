"""evenload inside Transformers' Trainer, in scripts that nobody edits: also TRL's SFT, PEFT, LLaMA-Factory.

    batches, num_items = trainer.get_batch_samples(epoch_iterator, num_batches, device)
    for inputs in batches:
        loss = trainer.training_step(model, inputs, num_items)

Two methods of the Trainer are wrapped (the rows are in `patches.transformers`). ``get_batch_samples`` begins a window
of the batches of one optimizer step, which go on through the Trainer's loop as they are, so that its counts, callbacks
and logs do not change. Each ``training_step`` cuts the batch that comes to it into samples, after whatever the script
does to it, and runs nothing; the last one plans the samples of all ranks as one global batch and runs the plan: each of
its forwards and backwards is the Trainer's own ``training_step`` on a pack, whose ``accelerator.backward`` waits for
its turn.

Exact where the Trainer sums token losses and divides by ``num_items_in_batch``, which counts the targets of all ranks.
Where it takes the mean of each batch, or each rank divides by its own number, a token keeps the weight that it has in
its stock batch (`pack_loss`); `supported` refuses the rest. All ranks run the same sequence of forwards and backwards,
because parameters (FSDP, ZeRO 3) and metrics (TRL) are gathered in every one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.attributes import with_attributes
from ...runtime.measure.busy import BusyClock
from ...runtime.world.agreement import rank_and_size
from ...runtime.world.plane import Plane
from ..host.step import Position, run_program
from ..huggingface.inputs import without_unread
from ..huggingface.models import num_windows
from ..huggingface.units import Unit
from ..unmodified.planned_loop import GlobalBatch, PlannedLoop
from ..unmodified.planned_runs import end_of_check, on_release, report_idle
from .hooks import GradientHooks
from .inside import inside, is_running
from .pack_loss import PackLoss
from .planning import Read, StepBatch, StepForm, chain_of, gather, reading, recipe_for, refuse_divisors
from .proof import LossRaisedError, Proof, prove_trainer, windows
from .proof_rows import rows_like
from .proof_units import prove_units, short_units
from .stage import StepPasses, TakenBatch, TrainerStage, attending, closed, log_step, run_stock
from .supported import (
    divides_by_batch,
    entered_module,
    inner_model,
    packs_fault,
    refuse_trainer,
    rows_fault,
    virtual_tokens,
    warn_of_dropout,
)
from .trackers import follow
from .unit_batches import STOCK, ReadUnits, UnitBatch, gather_units, read_units, unit_rows
from .unit_call import UnitCall

log = logging.getLogger("evenload")

NAME = "Transformers' Trainer"
"""What users call the loop."""


@dataclass(eq=False)
class StepWindow:
    """The batches of one optimizer step: counted by their calls, since a loader may give one object twice."""

    num_batches: int
    run: Any
    """The Trainer's state, of which every call of ``train`` makes another."""
    taken: list[TakenBatch] = field(default_factory=list)


@dataclass(eq=False)
class PlannedTrainer:
    """What evenload keeps for one Trainer."""

    recipe: Recipe
    unit_rows: int | None = None
    """Rows that stay together, where the loss is a mean over such units; None: it is a sum over tokens."""
    idle: Unit | None = None
    """A short unit, for a rank that has none."""
    planning: PlannedLoop | None = None
    """None until a form is measured to be exact, in the first step."""
    measured: dict[StepForm, PlanChain | EvenloadError] = field(default_factory=dict)
    """What plans micro-batches of a form, or why they are not exact."""
    packs: Proof = field(default_factory=partial(Proof, None))
    """What is measured of packs."""
    loss: PackLoss | None = None
    """Where a token's loss depends on the batch or the rank that it came in."""
    stays: bool = False
    """Its batches stay as they are: nothing is exact for it."""
    plane: Plane | None = None
    """What ranks share micro-batches over; made for the first plan that shares one."""
    window: StepWindow | None = None
    """Of the step that runs, until its plan has."""
    hooks: GradientHooks = field(default_factory=GradientHooks)


_planned: WeakKeyDictionary[Any, PlannedTrainer] = WeakKeyDictionary()


def get_batch_samples(wrapped: Any, trainer: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Trainer.get_batch_samples`, which begins a window; returns what the stock one does."""
    if is_running():  # inside a method of a script's own, around which the same wrapper is
        return wrapped(*args, **kwargs)
    with inside(trainer.accelerator):
        batches, num_items = wrapped(*args, **kwargs)
    if not batches:
        return batches, num_items
    state = _planned.get(trainer)
    if state is None:
        recipe = recipe_for(trainer, recipe)
        if not recipe.enabled():
            return batches, num_items
        state = _planned[trainer] = _begun(trainer, recipe, num_items)
        follow(trainer, partial(_numbers, state))
    if not state.stays:
        _refuse_unfinished(state, trainer)
        state.window = StepWindow(len(batches), trainer.state)
    return batches, num_items


def _numbers(state: PlannedTrainer) -> Mapping[str, float]:
    return state.planning.numbers if state.planning else {}


def _begun(trainer: Any, recipe: Recipe, num_items: Any) -> PlannedTrainer:
    """What is kept for a Trainer whose first window begins. Raises EvenloadError where it cannot be planned exactly."""
    units = unit_rows(trainer)
    if isinstance(units, EvenloadError):
        state = PlannedTrainer(recipe)
        _stays(state, units)
        return state
    refuse_trainer(trainer, of_units=units is not None)
    by_batch = units is None and divides_by_batch(trainer, num_items)
    return PlannedTrainer(recipe, units, loss=PackLoss(inner_model(trainer).loss_function) if by_batch else None)


def training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    """`Trainer.training_step`: the last one of a window runs its plan, those before it nothing."""
    with inside(trainer.accelerator):
        return _training_step(wrapped, trainer, args, kwargs)


def _training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    state = _planned.get(trainer)
    window = None if state is None else state.window
    if state is None or window is None:
        return wrapped(*args, **kwargs)
    call = dict(zip(("model", "inputs", "num_items_in_batch"), args, strict=False)) | kwargs
    model, num_items = call["model"], call.get("num_items_in_batch")
    inputs = trainer._prepare_inputs(call["inputs"])
    window.taken.append(TakenBatch(inputs, num_items, _reading(state, trainer, inputs, num_items)))
    # A script may pass over batches: the Trainer says which one is the last before its update.
    if not trainer.accelerator.gradient_state.sync_gradients and len(window.taken) < window.num_batches:
        return torch.zeros((), device=trainer.args.device)
    state.window = None
    # Of the script's own: it has seen the batches, and is not to see packs.
    with with_attributes(trainer, _prepare_inputs=lambda inputs: inputs):
        run = _run if state.unit_rows is None else _run_units
        loss = run(state, trainer, model, window.taken, lambda *batch: wrapped(model, *batch))
    end_of_check()
    return loss


@on_release
def release() -> None:
    """Forget every Trainer; for after the rows are off."""
    for state in _planned.values():
        if state.plane is not None:
            state.plane.close()
        state.hooks.release()
        state.planning = None
    _planned.clear()


def _run(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """All passes of this rank in a step; the loss that the Trainer books for it. Collective.

    Args:
        call: the Trainer's own ``training_step`` of a batch and its number of targets.
    """
    inner = inner_model(trainer)
    batch = gather([one.reading() for one in reversed(taken)][::-1], inner.config, hooked=state.hooks.watch(inner))
    if batch is None:
        return run_stock(trainer, model, taken, call)
    num_items = taken[-1].num_items
    if state.loss is None:
        refuse_divisors(batch, num_items)
    elif len(set(batch.num_batches)) > 1:  # each rank divides by its own number of batches
        return run_stock(trainer, model, taken, call)
    form = _form(state, trainer, batch, taken[-1])
    if form is None or state.planning is None:
        return run_stock(trainer, model, taken, call)
    plan = _plan(state, batch.samples, taken)
    if plan is None:
        return run_stock(trainer, model, taken, call)
    samples = batch.exchange(plan)

    def own_call(inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = call(inputs, num_items)
        return loss

    with attending(inner, state.packs.mixers) if form.packs else nullcontext():
        passes = StepPasses(own_call, samples, batch.inputs_of(form, state.loss), batch.hooked)
        return _carried_out(state, trainer, model, plan, passes)


def _run_units(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """`_run` where units change micro-batches."""
    inner = inner_model(trainer)
    try:
        batch = gather_units([one.reading() for one in taken], hooked=state.hooks.watch(inner))
    except EvenloadError as error:
        _stays(state, error)
        return run_stock(trainer, model, taken, call)
    if batch.divisor is None:
        log.info("step %d runs as it is: its batches have unlike numbers of units", trainer.state.global_step + 1)
        return run_stock(trainer, model, taken, call)
    if state.planning is None:
        try:
            state.planning = PlannedLoop(NAME, _measured_units(state, trainer, batch, taken[-1]))
        except EvenloadError as error:
            _stays(state, error)
            return run_stock(trainer, model, taken, call)
    plan = _plan(state, batch.samples, taken)
    if plan is None:
        return run_stock(trainer, model, taken, call)
    assert state.idle is not None
    units = batch.exchange(plan)
    own = UnitCall(trainer, call, units, state.idle, batch.form, batch.divisor)
    samples = {number: unit.longest for number, unit in units.items()}
    loss = _carried_out(state, trainer, model, plan, StepPasses(own, samples, own.inputs_of, batch.hooked))
    own.book(len(taken))
    return loss


def _plan(state: PlannedTrainer, samples: GlobalBatch[Any], taken: list[TakenBatch]) -> StepPlan | None:
    """The plan of a step; None where a stock run is as good. Collective."""
    assert state.planning is not None
    plan = state.planning.plan(samples.lengths)
    if stock := state.planning.stock_instead(samples, plan):
        log.info("step %d: %d samples of one length run as they are", state.planning.steps, len(plan.lengths))
        state.planning.report(stock)
        return None
    slots = sum(one.inputs["input_ids"].numel() for one in taken) // (state.unit_rows or 1)
    log_step(state.planning.steps, plan, slots)
    return plan


def _carried_out(state: PlannedTrainer, trainer: Any, model: Any, plan: StepPlan, passes: StepPasses) -> Tensor:
    """This rank's loss of a step that runs its plan. Collective."""
    assert state.planning is not None
    rank, size = rank_and_size()
    if plan.shared and state.plane is None:
        state.plane = Plane.make([tuple(range(size))], plan.limits.node_ranks)
    plane = state.plane if plan.shared else None
    program = closed(plan, rank)
    stage = TrainerStage(
        trainer,
        model,
        passes.call,
        samples=passes.samples,
        plane=plane,
        num_backwards=sum(action.kind == "backward" for action in program),
        inputs_of=passes.inputs_of,
    )
    entered = entered_module(trainer.accelerator, trainer.model)
    weighed = nullcontext() if state.loss is None else state.loss.within(inner_model(trainer))
    with stage.guarded(entered), weighed:
        run_program(plan, program, stage, Position(0, rank, plane=plane), BusyClock(stage.device))
    if passes.hooked:
        state.hooks.refuse_unlike()
    state.planning.report(plan)
    return stage.loss


def _stays(state: PlannedTrainer, why: EvenloadError) -> None:
    """Leave a Trainer's batches as they are, and say why."""
    state.stays = True
    report_idle(NAME, f"{why.what} ({why.found})", STOCK)


def _reading(state: PlannedTrainer, trainer: Any, inputs: Any, num_items: Any) -> Callable[[], Read | ReadUnits]:
    """What cuts a batch into what is planned of it."""
    config = inner_model(trainer).config
    if state.unit_rows is not None:
        units = read_units(inputs, state.unit_rows, config)
        return lambda: units
    return reading(without_unread(inputs, trainer.model, type(trainer)), config, num_items)


def _measured_units(state: PlannedTrainer, trainer: Any, batch: UnitBatch, taken: TakenBatch) -> PlanChain:
    """What plans a Trainer's units. Collective. Raises EvenloadError, on all ranks, where regrouping is not exact."""
    if fault := virtual_tokens(trainer.model):
        raise fault
    units = short_units(taken.reading().units)
    if fault := prove_units(trainer, units, taken.inputs, batch.form).fault:
        raise fault
    state.idle = units[0].shortened(2)
    warn_of_dropout(inner_model(trainer))
    return chain_of(state.recipe, trainer, whole=True, rows=batch.form.num_rows)


def _form(state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: TakenBatch) -> StepForm | None:
    """What the micro-batches of a step are: packs, where the model computes them, else padded groups; None where
    neither is exact, which is said once. Measured before the first step of a form. Collective."""
    faults: list[EvenloadError] = []
    forms = [StepForm(True)]
    # What a model makes of several samples in a row without their borders is its own affair.
    forms += [] if batch.flattened else [StepForm(False, batch.rows.left)]
    for form in forms:
        if form not in state.measured:
            state.measured[form] = _measured(state, trainer, batch, taken, form)
        chain = state.measured[form]
        unseen = batch.windows if form.packs and not state.packs.windows else None
        fault = chain if isinstance(chain, EvenloadError) else unseen
        if isinstance(chain, EvenloadError) or fault is not None:
            faults += [fault] if fault else []
            continue
        if state.planning is None:
            state.planning = PlannedLoop(NAME, chain)
        if faults and faults[0].found not in state.planning.warned:
            state.planning.warned.add(faults[0].found)
            log.info("samples are regrouped as padded rows: %s (%s)", faults[0].what, faults[0].found)
        state.planning.chain = chain
        return form
    raised = [one for one in faults if isinstance(one, LossRaisedError)]
    if raised and state.planning is None:  # before the first update
        raise raised[0]
    state.stays = batch.windows is None and not batch.flattened
    why = "; padded groups: ".join(f"{one.what} ({one.found})" for one in faults)
    report_idle(NAME, why, faults[-1].do)
    return None


def _measured(
    state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: TakenBatch, form: StepForm
) -> PlanChain | EvenloadError:
    """What plans a Trainer's steps in this form, or why it is not exact. Collective."""
    model, proof = inner_model(trainer), Proof(None)
    fault = virtual_tokens(trainer.model) or (packs_fault(model) if form.packs else rows_fault(state.loss is not None))
    if fault is None:
        samples = windows([*batch.samples.own.values()], from_start=batch.rows.start is not None)
        kind = None if form.packs else rows_like(batch.rows)
        proof = prove_trainer(trainer, samples, taken.inputs, taken.num_items, kind=kind, loss=state.loss)
        fault = proof.fault
    if fault is not None:
        return fault
    warn_of_dropout(model)
    state.packs = proof if form.packs else state.packs
    # Ranks do not share the keys of a window.
    unshared = num_windows(model.config) > 0 and any(plugin.shares for plugin in state.recipe.enabled())
    try:
        return chain_of(state.recipe, trainer, whole=not proof.may_cut or unshared, rows=int(not form.packs))
    except EvenloadError as error:
        if form.packs:
            raise
        return error


def _refuse_unfinished(state: PlannedTrainer, trainer: Any) -> None:
    """Raise EvenloadError where a script's ``training_step`` has kept back the last batch of a step."""
    window = state.window
    # Of a run that an exception ended, nothing is left to do: the next one begins with gradients of zero.
    if window is None or window.run is not trainer.state:
        return
    do = "call super().training_step(model, inputs, num_items_in_batch) for every batch, or leave evenload off"
    if window.taken:
        detail = f"{len(window.taken)} of {window.num_batches} before the update, and not the last"
        raise EvenloadError("batches of a planned step did not come to Trainer.training_step", detail, do)
    if state.planning is None:
        report_idle(NAME, f"{type(trainer).__name__} does not call Trainer.training_step", do)
