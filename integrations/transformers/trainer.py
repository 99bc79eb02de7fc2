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
from ...runtime.world.agreement import everyone, rank_and_size
from ..huggingface.inputs import without_unread
from ..huggingface.models import num_windows
from ..unmodified.planned_loop import PlannedLoop, leave
from ..unmodified.planned_runs import end_of_check, on_release, report_idle
from .conditions import as_if_without_dropout, twin_of
from .inside import inside, is_running
from .multimodal.measured import short_samples, with_parts
from .own_batches import fault_of, packs_of
from .pack_loss import PackLoss
from .planned import NAME, PlannedTrainer, StepWindow, carried_out, plan_of, stays, watching_hooks
from .planning import Read, StepBatch, StepForm, chain_of, gather, reading, recipe_for, refuse_divisors, with_work
from .proof import UNSTEADY, Measurement, Proof, of_flattened, prove_trainer, tolerance_of, windows
from .proof_rows import rows_like
from .stage import StepPasses, TakenBatch, attending, run_stock
from .supported import (
    build_of,
    divides_by_batch,
    inner_model,
    own_step,
    packs_fault,
    refuse_trainer,
    rows_fault,
    virtual_tokens,
    warn_of_dropout,
)
from .trackers import follow
from .units.batches import ReadUnits, read_units, unit_rows
from .units.step import run_units

log = logging.getLogger("evenload")

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
        try:
            state = _planned[trainer] = _begun(trainer, recipe, num_items)
        except EvenloadError as error:
            state = _planned[trainer] = PlannedTrainer(recipe, stays=True)
            leave(NAME, None, error)
        follow(trainer, partial(_numbers, state))
    if not state.stays:
        _refuse_unfinished(state, trainer)
        state.window = StepWindow(len(batches), trainer.state)
    return batches, num_items


def _numbers(state: PlannedTrainer) -> Mapping[str, float]:
    return state.planning.numbers if state.planning else {}


def _begun(trainer: Any, recipe: Recipe, num_items: Any) -> PlannedTrainer:
    """What is kept for a Trainer whose first window begins. Collective. Raises EvenloadError where it cannot be planned
    exactly."""
    if (fault := next(filter(None, everyone(own_step(trainer))), None)) is not None:
        raise fault
    units = unit_rows(trainer)
    if isinstance(units, EvenloadError):
        state = PlannedTrainer(recipe, 0, units)
        try:
            refuse_trainer(trainer, of_units=True)
        except EvenloadError as error:
            stays(state, units, error.found)
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
    model.train()  # completions are for training where it is in that mode
    with nullcontext() if state.packs is None else state.packs.running():  # it may score completions
        inputs = trainer._prepare_inputs(call["inputs"])
    window.taken.append(TakenBatch(inputs, num_items, _reading(state, trainer, inputs, num_items)))
    # A script may pass over batches: the Trainer says which one is the last before its update.
    if not trainer.accelerator.gradient_state.sync_gradients and len(window.taken) < window.num_batches:
        return torch.zeros((), device=trainer.args.device)
    state.window = None
    # Of the script's own: it has seen the batches, and is not to see packs.
    with with_attributes(trainer, _prepare_inputs=lambda inputs: inputs):
        run = _run if state.unit_rows is None else run_units
        loss = run(state, trainer, model, window.taken, lambda *batch: wrapped(model, *batch))
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
    try:
        step = _planned_step(state, trainer, taken)
    except EvenloadError as error:
        leave(NAME, state.planning, error)
        step, state.stays = None, not (state.planning and state.planning.has_run)
    if step is None:
        return run_stock(trainer, model, taken, call)
    batch, form, plan = step
    if batch.hooked and not state.hooks.are_known:
        return watching_hooks(state, lambda: run_stock(trainer, model, taken, call))
    inner, num_items, samples = inner_model(trainer), taken[-1].num_items, batch.exchange(plan)

    def own_call(inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = call(inputs, num_items)
        return loss

    parts = batch.parts_of_rank(inner, form, samples, plan, state.idles.get(form, ()))
    with attending(inner, state.proof.mixers) if form.packs else nullcontext():
        passes = StepPasses(own_call, samples, batch.inputs_of(form, state.loss, parts), batch.hooked)
        packed = batch.samples.packed(plan.limits) if batch.flattened else None
        return carried_out(state, trainer, model, plan, passes, packed)


def _planned_step(
    state: PlannedTrainer, trainer: Any, taken: list[TakenBatch]
) -> tuple[StepBatch, StepForm, StepPlan] | None:
    """The samples of a step, the form of its micro-batches and its plan; None where it runs as it is. Collective.
    Raises EvenloadError, the same on all ranks, where it cannot be planned exactly."""
    inner = inner_model(trainer)
    build, before = build_of(inner), state.build
    state.build = build
    read, changed = [one.reading() for one in reversed(taken)][::-1], before not in (None, build)
    batch = gather(read, inner.config, hooked=state.hooks.watch(inner), changed=changed)
    if batch is not None and batch.changed:
        state.measured.clear()
    state.has_targets = batch is not None or bool(state.has_targets)
    if batch is None:
        return None
    if state.loss is None:
        refuse_divisors(batch, taken[-1].num_items)
    elif len(set(batch.num_batches)) > 1:  # each rank divides by its own number of batches
        return None
    if batch.parts and batch.parts.fault:  # of this step alone
        leave(NAME, state.planning, batch.parts.fault)
        return None
    form = _form(state, trainer, batch, taken)
    plan = None if form is None else plan_of(state, batch.samples, taken)
    return None if form is None or plan is None else (batch, form, plan)


def _reading(state: PlannedTrainer, trainer: Any, inputs: Any, num_items: Any) -> Callable[[], Read | ReadUnits | None]:
    """What cuts a batch into what is planned of it."""
    config = inner_model(trainer).config
    if state.unit_rows == 0:
        return lambda: None
    if state.unit_rows is not None:
        units = read_units(inputs, state.unit_rows, config)
        return lambda: units
    return reading(without_unread(inputs, trainer.model, type(trainer)), config, num_items)


def _form(state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: list[TakenBatch]) -> StepForm | None:
    """What the micro-batches of a step are: packs, where the model computes them, else padded groups; None where
    neither is exact, which is said once. Measured before the first step of a form. Collective."""
    faults: list[EvenloadError] = []
    forms = [StepForm(True, parts=batch.part_form)]
    # What a model makes of several samples in a row without their borders is its own affair.
    forms += [] if batch.flattened else [StepForm(False, batch.rows.left, batch.part_form)]
    for form in forms:
        if form not in state.measured:
            state.measured[form] = _measured(state, trainer, batch, taken, form)
        chain = state.measured[form]
        unseen = batch.windows if form.packs and not state.proof.windows else None
        fault = chain if isinstance(chain, EvenloadError) else unseen
        if isinstance(chain, EvenloadError) or fault is not None:
            faults += [fault] if fault else []
            if fault is not None and fault.what == UNSTEADY:  # by chance the next form could seem exact
                break
            continue
        if state.planning is None:
            state.planning = PlannedLoop(NAME, chain)
        if faults and faults[0].found not in state.planning.warned:
            state.planning.warned.add(faults[0].found)
            log.info("samples are regrouped as padded rows: %s (%s)", faults[0].what, faults[0].found)
        state.planning.chain = with_work(chain, inner_model(trainer), batch) if batch.parts else chain
        return form
    state.stays = batch.windows is None and not batch.flattened
    why = "; padded groups: ".join(f"{one.what} ({one.found})" for one in faults)
    report_idle(NAME, why, faults[-1].do)
    return None


def _measured(
    state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: list[TakenBatch], form: StepForm
) -> PlanChain | EvenloadError:
    """What plans a Trainer's steps in this form, or why it is not exact. Collective."""
    model, proof = inner_model(trainer), Proof(None)
    fault = virtual_tokens(trainer.model) or (packs_fault(model) if form.packs else rows_fault(state.loss is not None))
    if fault is None:
        kind = Measurement if form.packs else rows_like(batch.rows)
        if batch.parts:
            samples, parts, state.idles[form] = short_samples(batch.samples.own, batch.parts, model.config)
            kind = with_parts(kind, parts, form.parts, left=form.left)
        else:
            samples = windows([*batch.samples.own.values()], from_start=batch.rows.start is not None)
            kind = of_flattened(kind) if batch.flattened else kind
        proof = prove_trainer(trainer, samples, taken[-1].inputs, taken[-1].num_items, kind=kind, loss=state.loss)
        fault = proof.fault
    if fault is not None:
        return fault
    warn_of_dropout(model)
    state.proof = proof if form.packs else state.proof
    # Ranks do not share the keys of a window.
    unshared = num_windows(model.config) > 0 and bool(state.recipe.deciding("shares"))
    try:
        chain = chain_of(state.recipe, trainer, whole=not proof.may_cut or unshared, rows=int(not form.packs))
    except EvenloadError as error:
        if form.packs:
            raise
        return error
    fault = None if batch.parts else _fault_of_own(state, trainer, batch, taken, form, chain)
    return fault or chain


def _fault_of_own(
    state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: list[TakenBatch], form: StepForm, chain: PlanChain
) -> EvenloadError | None:
    """Why the script's own batches of this step have another loss than their samples in this form. Collective."""
    inner, twin, device = inner_model(trainer), twin_of(trainer), trainer.args.device
    model, of_pack = trainer.accelerator.unwrap_model(trainer.model), batch.inputs_of(form, state.loss)

    def loss_of(inputs: dict[str, Any], num_items: Any) -> Any:
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with twin.compute_loss_context_manager():
            return twin.compute_loss(model, copied, num_items_in_batch=num_items)

    most = chain.caps.max_tokens
    packs = packs_of(batch, rank_and_size()[0], most, device, rows=not form.packs)
    own = [partial(loss_of, one.inputs, one.num_items) for one in taken]
    planned = [lambda pack=pack: loss_of(of_pack(pack), taken[-1].num_items) for pack in packs]
    attends = partial(attending, inner, state.proof.mixers) if form.packs else nullcontext
    half = {torch.bfloat16} if trainer.args.bf16 or trainer.args.fp16 else set[torch.dtype]()
    with as_if_without_dropout(inner, device), nullcontext() if state.loss is None else state.loss.in_place(inner):
        return fault_of(own, planned, attends, tolerance_of(inner, half))


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
