"""evenload inside Transformers' Trainer, in scripts that nobody edits: also TRL's SFTTrainer, PEFT, LLaMA-Factory.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...core.errors import EvenloadError, refuse_first
from ...core.plan.action import Program, dummy
from ...core.plan.program import lower
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.attention.pack import Pack
from ...runtime.attributes import with_attributes
from ...runtime.measure.busy import BusyClock
from ...runtime.world.agreement import rank_and_size
from ...runtime.world.plane import Plane
from ..host.step import Position, run_program
from ..huggingface import attention
from ..huggingface.inputs import inputs_of, without_unread
from ..huggingface.rows import rows_of
from ..unmodified.planned_loop import PlannedLoop
from ..unmodified.planned_runs import end_of_check, on_release, report_idle
from .hooks import GradientHooks
from .inside import inside, is_running
from .pack_loss import PackLoss
from .planning import Read, StepBatch, chain_of, gather, read, recipe_for
from .proof import LossRaisedError, prove_trainer, windows
from .proof_rows import rows_like
from .stage import TrainerStage, reducing
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

log = logging.getLogger("evenload")

NAME = "Transformers' Trainer"
"""What users call the loop."""


class TakenBatch(NamedTuple):
    """A batch that came to `Trainer.training_step`."""

    inputs: Any
    """As the model would have got it."""
    num_items: Any
    read: Read


@dataclass(eq=False)
class StepWindow:
    """The batches of one optimizer step: counted by their calls, since a loader may give one object twice."""

    num_batches: int
    run: Any
    """The Trainer's state, of which every call of ``train`` makes another."""
    taken: list[TakenBatch] = field(default_factory=list)


class StepForm(NamedTuple):
    """What the micro-batches of planned steps are."""

    packs: bool
    """Else padded groups."""
    left: bool = False
    """Rows of these are padded on the left."""


@dataclass(eq=False)
class PlannedTrainer:
    """What evenload keeps for one Trainer."""

    recipe: Recipe
    planning: PlannedLoop | None = None
    """None until a form is measured to be exact, in the first step."""
    measured: dict[StepForm, PlanChain | EvenloadError] = field(default_factory=dict)
    """What plans micro-batches of a form, or why they are not exact."""
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
        refuse_trainer(trainer)
        by_batch = divides_by_batch(trainer, num_items)
        state = _planned[trainer] = PlannedTrainer(recipe)
        state.loss = PackLoss(inner_model(trainer).loss_function) if by_batch else None
    if not state.stays:
        _refuse_unfinished(state, trainer)
        state.window = StepWindow(len(batches), trainer.state)
    return batches, num_items


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
    known = without_unread(inputs, trainer.model, type(trainer))
    window.taken.append(TakenBatch(inputs, num_items, read(known, inner_model(trainer).config, num_items)))
    # A script may pass over batches: the Trainer says which one is the last before its update.
    if not trainer.accelerator.gradient_state.sync_gradients and len(window.taken) < window.num_batches:
        return torch.zeros((), device=trainer.args.device)
    state.window = None
    # Of the script's own: it has seen the batches, and is not to see packs.
    with with_attributes(trainer, _prepare_inputs=lambda inputs: inputs):
        loss = _run(state, trainer, model, window.taken, lambda *batch: wrapped(model, *batch))
    end_of_check()
    return loss


@on_release
def release() -> None:
    """Forget every Trainer; for after the rows are off."""
    for state in _planned.values():
        if state.plane is not None:
            state.plane.close()
        state.hooks.release()
    _planned.clear()


def _run(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """All passes of this rank in a step; the loss that the Trainer books for it. Collective.

    Args:
        call: the Trainer's own ``training_step`` of a batch and its number of targets.
    """
    inner = inner_model(trainer)
    batch = gather([one.read for one in taken], inner.config, hooked=state.hooks.watch(inner))
    if batch is None:
        return _run_stock(trainer, model, taken, call)
    num_items = taken[-1].num_items
    if state.loss is None:
        _refuse_divisors(batch, num_items)
    elif len(set(batch.num_batches)) > 1:  # each rank divides by its own number of batches
        return _run_stock(trainer, model, taken, call)
    form = _form(state, trainer, batch, taken[-1])
    if form is None or state.planning is None:
        return _run_stock(trainer, model, taken, call)
    rank, size = rank_and_size()
    plan = state.planning.plan(batch.samples.lengths)
    if stock := state.planning.stock_instead(batch.samples, plan):
        log.info("step %d: %d samples of one length run as they are", state.planning.steps, len(plan.lengths))
        state.planning.report(stock)
        return _run_stock(trainer, model, taken, call)
    _log_step(state.planning.steps, plan, sum(one.inputs["input_ids"].numel() for one in taken))
    if plan.shared and state.plane is None:
        state.plane = Plane.make([tuple(range(size))], plan.limits.node_ranks)
    plane = state.plane if plan.shared else None
    program = _closed(plan, rank)
    stage = TrainerStage(
        trainer,
        model,
        lambda pack: call(pack, num_items),
        samples=batch.exchange(plan),
        plane=plane,
        num_backwards=sum(action.kind == "backward" for action in program),
        inputs_of=_inputs_of(batch, form, state.loss),
    )
    attends = _attention(inner) if form.packs else nullcontext()
    entered = entered_module(trainer.accelerator, trainer.model)
    with attends, stage.guarded(entered), nullcontext() if state.loss is None else state.loss.within(inner):
        run_program(plan, program, stage, Position(0, rank, plane=plane), BusyClock(stage.device))
    if batch.hooked:
        state.hooks.refuse_unlike()
    state.planning.report(plan)
    return stage.loss


def _form(state: PlannedTrainer, trainer: Any, batch: StepBatch, taken: TakenBatch) -> StepForm | None:
    """What the micro-batches of a step are: packs, where the model computes them, else padded groups; None where
    neither is exact, which is said once. Measured before the first step of a form. Collective."""
    faults: list[EvenloadError] = [] if batch.windows is None else [batch.windows]
    forms = [StepForm(True)] if batch.windows is None else []
    # What a model makes of several samples in a row without their borders is its own affair.
    forms += [] if batch.flattened else [StepForm(False, batch.rows.left)]
    for form in forms:
        if form not in state.measured:
            state.measured[form] = _measured(state, trainer, batch, taken, form)
        chain = state.measured[form]
        if isinstance(chain, EvenloadError):
            faults.append(chain)
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
    model, may_cut = inner_model(trainer), False
    fault = virtual_tokens(trainer.model) or (packs_fault(model) if form.packs else rows_fault(state.loss is not None))
    if fault is None:
        samples = windows([*batch.samples.own.values()], from_start=batch.rows.start is not None)
        kind = None if form.packs else rows_like(batch.rows)
        fault, may_cut = prove_trainer(trainer, samples, taken.inputs, taken.num_items, kind=kind, loss=state.loss)
    if fault is not None:
        return fault
    warn_of_dropout(model)
    try:
        return chain_of(state.recipe, trainer, whole=not may_cut, rows=not form.packs)
    except EvenloadError as error:
        if form.packs:
            raise
        return error


def _inputs_of(batch: StepBatch, form: StepForm, loss: PackLoss | None) -> Callable[[Pack], dict[str, Any]]:
    """The arguments of the model's call for a micro-batch of a step, whose tokens ``loss`` is told to weigh."""
    if not form.packs:
        return lambda pack: rows_of(pack, batch.rows)

    def of_pack(pack: Pack) -> dict[str, Any]:
        if loss is not None:
            loss.refuse_unused()
            loss.weigh(pack, batch.divisors)
        return inputs_of(pack, with_mask=batch.has_mask)

    return of_pack


def _run_stock(trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """The batches of a step one by one, as a run without evenload has them."""
    loss = torch.zeros((), device=trainer.args.device)
    for number, one in enumerate(taken, 1):
        with reducing(trainer.accelerator, model, number == len(taken)):
            loss = loss + call(one.inputs, one.num_items)
    return loss


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


def _log_step(step: int, plan: StepPlan, num_slots: int) -> None:
    """Say what a plan does. ``num_slots``: tokens of this rank's own batches, padding included."""
    own = [plan.micro_batches[index] for index in plan.of_rank(rank_and_size()[0])]
    log.info(
        "step %d: %d samples in %d micro-batches, %d of them shared by ranks, %d samples cut; %d tokens on this rank "
        "instead of %d",
        step,
        len(plan.lengths),
        len(plan.micro_batches),
        sum(len(micro_batch.ranks) > 1 for micro_batch in plan.micro_batches),
        len(plan.cut),
        sum(-(-micro_batch.num_padded_tokens // len(micro_batch.ranks)) for micro_batch in own),
        num_slots,
    )


def _refuse_divisors(batch: StepBatch, num_items: Any) -> None:
    """Raise EvenloadError unless one number divides the losses of all batches: samples change places among them."""
    divisors = sorted(set(batch.divisors))
    refuse_first(
        (
            num_items is None or len(divisors) > 1,
            "the batches of one step are not divided by one number",
            f"num_items_in_batch = {', '.join(f'{one:g}' for one in divisors) if num_items is not None else None}",
            "call super().training_step(model, inputs, num_items_in_batch) with the number that the Trainer gives",
        )
    )


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
