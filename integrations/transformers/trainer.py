"""evenload inside Transformers' Trainer, in scripts that nobody edits: also TRL's SFT, PEFT, LLaMA-Factory.

    batches, num_items = trainer.get_batch_samples(epoch_iterator, num_batches, device)
    for inputs in batches:
        loss = trainer.training_step(model, inputs, num_items)

Two methods of the Trainer are wrapped (the rows are in `patches.transformers`). ``get_batch_samples`` begins a step,
whose batches go on through the Trainer's loop as they are, so that its counts, callbacks and logs do not change. Each
``training_step`` cuts the batch that comes to it into samples, after whatever the script does to it, and runs nothing;
the last one plans the samples of all ranks as one global batch and runs the plan: each of its forwards and backwards is
the Trainer's own ``training_step`` on a pack, whose ``accelerator.backward`` waits for its turn.

Exact where the Trainer sums token losses and divides by ``num_items_in_batch``, which counts the targets of all ranks.
Where it takes the mean of each batch, or each rank divides by its own number, a token keeps the weight that it has in
its stock batch (`pack_loss`); `supported` refuses the rest. All ranks run the same sequence of forwards and backwards,
because parameters (FSDP, ZeRO 3) and metrics (TRL) are gathered in every one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.attributes import with_attributes
from ...runtime.world.agreement import everyone
from ..huggingface.inputs import without_unread
from ..huggingface.models import num_windows
from ..unmodified.planned_loop import Loops
from ..unmodified.planned_runs import end_of_check, on_release, report_idle
from .inside import inside, is_running
from .own_batches import own_batches_fault
from .pack_call import PackCalls
from .pack_loss import PackLoss
from .planned import NAME, PlannedTrainer, StepBatches, TakenBatch, TrainerStep, UnitLoop, leave_unplanned
from .planning import StepForm, StepSamples, chain_of, gather, reading, recipe_for, refuse_divisors, with_work
from .probe_samples import SamplePair, prove_shared, prove_trainer
from .proof import UNSTEADY, Proof
from .stage import attending
from .supported import (
    build_of,
    divides_by_batch,
    dropouts_fault,
    inner_model,
    own_step,
    packs_fault,
    refuse_trainer,
    rows_fault,
    virtual_tokens,
    warn_of_dropout,
)
from .trackers import follow
from .units.batches import read_units, unit_rows
from .units.step import run_units

log = logging.getLogger("evenload")

_planned: Loops[PlannedTrainer] = Loops()
on_release(_planned.release)


def get_batch_samples(wrapped: Any, trainer: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Trainer.get_batch_samples`, which begins a step; returns what the stock one does."""
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
        try:
            state = _planned[trainer] = _begun(trainer, recipe, num_items)
        except EvenloadError as error:
            state = _planned[trainer] = PlannedTrainer(recipe=recipe, stays=True)
            state.leave(error)
        follow(trainer, state)
    if not state.stays:
        _refuse_unfinished(state, trainer)
        state.coming = StepBatches(len(batches), trainer.state)
    return batches, num_items


def _begun(trainer: Any, recipe: Recipe, num_items: Any) -> PlannedTrainer:
    """What is kept for a Trainer whose first step begins. Collective. Raises EvenloadError where it cannot be planned
    exactly."""
    if (fault := next(filter(None, everyone(own_step(trainer))), None)) is not None:
        raise fault
    units = unit_rows(trainer)
    if isinstance(units, EvenloadError):
        state = PlannedTrainer(recipe=recipe, units=UnitLoop(0, units))
        try:
            refuse_trainer(trainer, of_units=True)
        except EvenloadError as error:
            leave_unplanned(state, units, error.found)
        return state
    refuse_trainer(trainer, of_units=units is not None)
    by_batch = units is None and divides_by_batch(trainer, num_items)
    loss = PackLoss(inner_model(trainer).loss_function) if by_batch else None
    return PlannedTrainer(recipe=recipe, units=None if units is None else UnitLoop(units), loss=loss)


def training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    """`Trainer.training_step`: the last one of a step runs its plan, those before it nothing."""
    with inside(trainer.accelerator):
        return _training_step(wrapped, trainer, args, kwargs)


def _training_step(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    state = _planned.get(trainer)
    coming = None if state is None else state.coming
    if state is None or coming is None:
        return wrapped(*args, **kwargs)
    call = dict(zip(("model", "inputs", "num_items_in_batch"), args, strict=False)) | kwargs
    model, num_items = call["model"], call.get("num_items_in_batch")
    model.train()  # completions are for training where it is in that mode
    with state.unpadded():  # it may score completions
        inputs = trainer._prepare_inputs(call["inputs"])
    coming.taken.append(TakenBatch(inputs, num_items, _reading(state, trainer, inputs, num_items)))
    # A script may pass over batches: the Trainer says which one is the last before its update.
    if not trainer.accelerator.gradient_state.sync_gradients and len(coming.taken) < coming.num_batches:
        return torch.zeros((), device=trainer.args.device)
    state.coming = None
    step = TrainerStep(state, trainer, model, lambda *batch: wrapped(model, *batch), coming.taken)
    # Of the script's own: it has seen the batches, and is not to see packs.
    with with_attributes(trainer, _prepare_inputs=lambda inputs: inputs):
        loss = _run(step) if state.units is None else run_units(step, state.units)
    end_of_check()
    return loss


def ended(trainer: Any) -> None:
    """Say why a run that has ended planned nothing, where nobody has."""
    state, rows = _planned.get(trainer), trainer.train_dataset
    if state is None and (done := trainer.state.global_step):
        do = "call super().get_batch_samples; a run resumed at its last step has nothing to plan"
        report_idle(NAME, f"no batch came by Trainer.get_batch_samples, and {done} steps are done", do)
    elif state is None:
        held = f"its train_dataset holds {len(rows)} rows" if hasattr(rows, "__len__") else "its loader gave no batch"
        do = "see what leaves rows out while the dataset is prepared (TRL: max_length)"
        report_idle(NAME, f"its loop ran no step: {held}", do)
    elif state.has_targets is False:
        do = "see what masks the labels: a chat template, completion_only_loss, max_length"
        report_idle(NAME, "no row of any step has a target: all labels are -100", do)


def _run(step: TrainerStep) -> Tensor:
    """All passes of this rank in a step; the loss that the Trainer books for it. Collective."""
    state, inner, num_items = step.state, step.inner, step.last.num_items
    try:
        planned = _planned_step(step)
    except EvenloadError as error:
        state.leave(error)
        planned, state.stays = None, not state.has_run
    if planned is None:
        return step.run_stock()
    batch, form, plan = planned
    if batch.hooked and not state.hooks.are_known:
        return step.run_stock(hooked=True)
    samples = batch.exchange(plan)
    parts = batch.parts_of_rank(inner, form, samples, plan, state.filler_samples.get(form, ()))
    inputs_of = batch.inputs_of(form, state.loss, parts)
    packed = batch.samples.packed(plan.limits) if batch.flattened else None
    with attending(inner, state.proof.mixers) if form.packs else nullcontext():
        return step.run_plan(
            plan, lambda inputs: step.call(inputs, num_items), samples, inputs_of, hooked=batch.hooked, packed=packed
        )


def _planned_step(step: TrainerStep) -> tuple[StepSamples, StepForm, StepPlan] | None:
    """The samples of a step, the form of its micro-batches and its plan; None where it runs as it is. Collective.
    Raises EvenloadError, the same on all ranks, where it cannot be planned exactly."""
    state, inner = step.state, step.inner
    build, before = build_of(inner), state.build
    state.build = build
    read, changed = [one.reading() for one in reversed(step.batches)][::-1], before not in (None, build)
    batch = gather(read, inner.config, hooked=state.hooks.watch(inner), changed=changed)
    if batch is not None and batch.changed:
        state.measured.clear()
    state.has_targets = batch is not None or bool(state.has_targets)
    if batch is None:
        return None
    if state.loss is None:
        refuse_divisors(batch, step.last.num_items)
    elif len(set(batch.num_batches)) > 1:  # each rank divides by its own number of batches
        return None
    if batch.parts and batch.parts.fault:  # of this step alone
        state.leave(batch.parts.fault)
        return None
    form = _form(step, batch)
    plan = None if form is None else step.plan(batch.samples)
    return None if form is None or plan is None else (batch, form, plan)


def _reading(state: PlannedTrainer, trainer: Any, inputs: Any, num_items: Any) -> Callable[[], Any]:
    """What cuts a batch into what is planned of it: a `ParsedBatch` or `ReadUnits`; None where rows stay."""
    config = inner_model(trainer).config
    if state.units is not None:
        units = read_units(inputs, state.units.num_rows, config) if state.units.num_rows else None
        return lambda: units
    return reading(without_unread(inputs, trainer.model, type(trainer)), config, num_items)


def _form(step: TrainerStep, batch: StepSamples) -> StepForm | None:
    """What the micro-batches of a step are: packs, where the model computes them, else padded groups; None where
    neither is exact, which is said once. Measured before the first step of a form. Collective."""
    state, faults = step.state, list[EvenloadError]()
    forms = [StepForm(True, parts=batch.part_form)]
    # What a model makes of several samples in a row without their borders is its own affair.
    forms += [] if batch.flattened else [StepForm(False, batch.rows.left, batch.part_form)]
    for form in forms:
        if form not in state.measured:
            state.measured[form] = _measured(step, batch, form)
        chain = state.measured[form]
        unseen = batch.unseen if form.packs and not state.proof.sees_windows else None
        fault = chain if isinstance(chain, EvenloadError) else unseen
        if isinstance(chain, EvenloadError) or fault is not None:
            faults += [fault] if fault else []
            if fault is not None and fault.what == UNSTEADY:  # by chance the next form could seem exact
                break
            continue
        if faults and faults[0].found not in state.warned:
            state.warned.add(faults[0].found)
            log.info("samples are regrouped as padded rows: %s (%s)", faults[0].what, faults[0].found)
        state.chain = with_work(chain, step.inner, batch) if batch.parts else chain
        return form
    state.stays = batch.unseen is None and not batch.flattened
    why = "; padded groups: ".join(f"{one.what} ({one.found})" for one in faults)
    report_idle(NAME, why, faults[-1].do)
    return None


def _measured(step: TrainerStep, batch: StepSamples, form: StepForm) -> PlanChain | EvenloadError:
    """What plans a Trainer's steps in this form, or why it is not exact. Collective."""
    state, trainer, model, proof = step.state, step.trainer, step.inner, Proof(None)
    fault = virtual_tokens(trainer.model) or (packs_fault(model) if form.packs else rows_fault(state.loss is not None))
    if fault is None:
        pair, state.filler_samples[form] = SamplePair.of(batch, form, step.last.inputs, model.config)
        proof = prove_trainer(trainer, pair, step.last.num_items, loss=state.loss)
        fault = proof.fault
    if fault is not None:
        return fault
    warn_of_dropout(model)
    state.proof = proof if form.packs else state.proof
    if form.packs and not form.parts and not proof.mixers:
        state.shares = _shares(step, pair)
    # Ranks do not share the keys of a window.
    unshared = num_windows(model.config) > 0 and bool(state.recipe.deciding("shares"))
    try:
        chain = chain_of(state.recipe, trainer, whole=not proof.may_cut or unshared, rows=int(not form.packs))
    except EvenloadError as error:
        if form.packs:
            raise
        return error
    fault = None if batch.parts else own_batches_fault(step, batch, form, chain.caps.max_tokens)
    return fault or chain


def _shares(step: TrainerStep, pair: SamplePair) -> PackCalls | None:
    """What computes once what samples of a pack begin with in common; None where that is not exact. Collective."""
    state, trainer, calls = step.state, step.trainer, PackCalls(step.trainer)
    if not state.recipe.trees or not calls.is_any:
        return None
    calls.rows = False
    fault = dropouts_fault(step.inner) or prove_shared(
        trainer, pair.forked(), calls, step.last.num_items, loss=state.loss
    )
    if fault is not None:
        log.info("each sample computes all of its tokens: %s (%s)", fault.what, fault.found)
        step.say_no_trees(f"{fault.what} ({fault.found})")
    calls.num_saved = 0
    return None if fault else calls


def _refuse_unfinished(state: PlannedTrainer, trainer: Any) -> None:
    """Raise EvenloadError where a script's ``training_step`` has kept back the last batch of a step."""
    coming = state.coming
    # Of a run that an exception ended, nothing is left to do: the next one begins with gradients of zero.
    if coming is None or coming.run is not trainer.state:
        return
    do = "call super().training_step(model, inputs, num_items_in_batch) for every batch, or leave evenload off"
    if coming.taken:
        detail = f"{len(coming.taken)} of {coming.num_batches} before the update, and not the last"
        raise EvenloadError("batches of a planned step did not come to Trainer.training_step", detail, do)
    if state.planners is None:
        report_idle(NAME, f"{type(trainer).__name__} does not call Trainer.training_step", do)
