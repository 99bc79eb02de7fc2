"""What evenload keeps for one Trainer, and the step of it that runs its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.measure.busy import BusyClock
from ...runtime.world.agreement import rank_and_size
from ...runtime.world.plane import Plane
from ..host.step import Position, run_program
from ..huggingface.units import Unit, slots_of
from ..unmodified.planned_loop import GlobalBatch, PlannedLoop, leave
from ..unmodified.planned_runs import report_idle
from .hooks import GradientHooks
from .multimodal.step import IdleSample
from .pack_call import PackCalls
from .pack_loss import PackLoss
from .planning import StepForm
from .proof import STOCK, Proof
from .stage import StepPasses, TakenBatch, TrainerStage, closed, log_step
from .supported import entered_module, inner_model

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


class MeasuredUnits(NamedTuple):
    """What changes micro-batches exactly in the batches of a Trainer."""

    of_mean: bool
    """A batch's loss is the mean of its units'; else their sum over a number of the whole step."""
    idle: Unit
    """A short one, for a rank that has none."""
    packs: PackCalls | None
    """What computes them without padding; None: in padded rows."""


@dataclass(eq=False)
class PlannedTrainer:
    """What evenload keeps for one Trainer."""

    recipe: Recipe
    unit_rows: int | None = None
    """Rows that stay together, where the loss goes by such units; 0: all stay in place; None: it goes by tokens."""
    in_place_why: EvenloadError | None = None
    """Why its rows stay where they are, where its class and settings say so."""
    units: MeasuredUnits | None = None
    """None until measured, in the first step."""
    in_place: bool = False
    """Its rows stay where they are."""
    packs: PackCalls | None = None
    """What computes rows without padding, where that is exact."""
    idles: dict[StepForm, list[IdleSample]] = field(default_factory=dict)
    """Short samples with pictures, for micro-batches that have none."""
    planning: PlannedLoop | None = None
    """None until a form is measured to be exact, in the first step."""
    build: list[tuple[Any, ...]] | None = None
    """Of the model that was measured; see `build_of`."""
    measured: dict[StepForm, PlanChain | EvenloadError] = field(default_factory=dict)
    """What plans micro-batches of a form, or why they are not exact."""
    proof: Proof = field(default_factory=partial(Proof, None))
    """What is measured of packs."""
    loss: PackLoss | None = None
    """Where a token's loss depends on the batch or the rank that it came in."""
    has_targets: bool | None = None
    """A row of some step has a target; None: no step has been looked at."""
    stays: bool = False
    """Its batches stay as they are: nothing is exact for it."""
    plane: Plane | None = None
    """What ranks share micro-batches over; made for the first plan that shares one."""
    window: StepWindow | None = None
    """Of the step that runs, until its plan has."""
    hooks: GradientHooks = field(default_factory=GradientHooks)


def plan_of(state: PlannedTrainer, samples: GlobalBatch[Any], taken: list[TakenBatch]) -> StepPlan | None:
    """The plan of a step; None where a stock run is as good. Collective."""
    assert state.planning is not None
    plan = state.planning.plan(samples.lengths)
    if stock := state.planning.stock_instead(samples, plan):
        log.info("step %d: %d samples of one length run as they are", state.planning.steps, len(plan.lengths))
        state.planning.report(stock)
        return None
    slots = sum(slots_of(one.inputs) for one in taken) // (state.unit_rows or 1)
    log_step(state.planning.steps, plan, slots)
    return plan


def carried_out(
    state: PlannedTrainer, trainer: Any, model: Any, plan: StepPlan, passes: StepPasses, packed: StepPlan | None = None
) -> Tensor:
    """This rank's loss of a step that runs its plan. Collective. ``packed``: the Trainer's own step, where its rows
    hold several samples."""
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
    state.planning.report(plan, packed=packed)
    return stage.loss


def watching_hooks(state: PlannedTrainer, run: Callable[[], Tensor]) -> Tensor:
    """The loss of a step that runs as it is while hooks on parameters are watched; where one is not linear, so do all
    later steps. Collective."""
    loss = run()
    try:
        state.hooks.refuse_unlike()
    except EvenloadError as error:
        leave(NAME, None, error)
        state.stays = True
    return loss


def stays(state: PlannedTrainer, why: EvenloadError, padded: str | None) -> None:
    """Leave a Trainer's rows where they are, and say why, and why they are padded; None: they are not."""
    state.stays = padded is not None
    report_idle(NAME, f"{why.what} ({why.found}; {padded or 'their padding is not computed'})", STOCK)
