"""What evenload keeps for one Trainer, and the step of it that runs its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.planning.notes import warn_of_no_trees
from ...core.planning.trees import Branch, plan_shared
from ...core.recipe.recipe import Recipe
from ...runtime.attention.pack import Pack
from ...runtime.measure.busy import BusyClock
from ...runtime.world.agreement import rank_and_size
from ...runtime.world.plane import Plane
from ..host.step import Position, run_program
from ..huggingface.units import Unit, slots_of
from ..unmodified.planned_loop import GlobalBatch, LoopSession
from ..unmodified.planned_runs import report_idle
from .hooks import GradientHooks
from .multimodal.step import FillerSample
from .pack_call import PackCalls
from .pack_loss import PackLoss
from .planning import StepForm
from .proof import STOCK, Proof
from .stage import TrainerStage, closed, log_step, reducing
from .supported import entered_module, inner_model

log = logging.getLogger("evenload")

NAME = "Transformers' Trainer"
"""What users call the loop."""


class TakenBatch(NamedTuple):
    """A batch that came to `Trainer.training_step`."""

    inputs: Any
    """As the model would have got it."""
    num_items: Any
    reading: Callable[[], Any]
    """Cuts it, as it was when it came, into what is planned: samples, or units where these stay together."""


@dataclass(eq=False)
class StepBatches:
    """The batches of one optimizer step, until its last: counted by their calls, since a loader may give one object
    twice."""

    num_batches: int
    run: Any
    """The Trainer's state, of which every call of ``train`` makes another."""
    taken: list[TakenBatch] = field(default_factory=list)


@dataclass(eq=False)
class UnitLoop:
    """How a Trainer is planned whose loss goes by units of rows. It is measured in the first step."""

    num_rows: int
    """Of a unit; 0: it has none."""
    why: EvenloadError | None = None
    """Why its rows stay in their batches, by its class and settings."""
    is_measured: bool = False
    of_mean: bool = True
    """A batch's loss is the mean of its units'; else their sum over a number of the whole step."""
    filler: Unit | None = None
    """A short unit, for a rank that has none; None: units stay in their batches."""
    packs: PackCalls | None = None
    """What computes rows without padding, where that is exact; None: they are padded."""


def _whole_world() -> Plane:
    """What ranks share micro-batches over: all of them."""
    return Plane.make([tuple(range(rank_and_size()[1]))])


@dataclass(eq=False, kw_only=True)
class PlannedTrainer(LoopSession):
    """What evenload keeps for one Trainer; it has planners once a form is measured to be exact, in the first step."""

    name: str = NAME
    recipe: Recipe
    units: UnitLoop | None = None
    """What is kept where rows stay together in units; None: the loss goes by tokens."""
    filler_samples: dict[StepForm, list[FillerSample]] = field(default_factory=dict)
    """Short samples with pictures, for micro-batches that have none."""
    build: list[tuple[Any, ...]] | None = None
    """Of the model that was measured; see `build_of`."""
    measured: dict[StepForm, PlanChain | EvenloadError] = field(default_factory=dict)
    """What plans micro-batches of a form, or why they are not exact."""
    proof: Proof = field(default_factory=partial(Proof, None))
    """What is measured of packs."""
    shares: PackCalls | None = None
    """Has samples of a pack share what they begin with; None: each computes all of its tokens."""
    loss: PackLoss | None = None
    """Where a token's loss depends on the batch or the rank that it came in."""
    has_targets: bool | None = None
    """A row of some step has a target; None: no step has been looked at."""
    coming: StepBatches | None = None
    """Batches of the step that runs, until the last has come."""
    hooks: GradientHooks = field(default_factory=GradientHooks)

    def __post_init__(self) -> None:
        self.undo.callback(self.hooks.release)

    def unpadded(self) -> AbstractContextManager[None]:
        """Inside, calls on padded rows run as packs where that is exact."""
        return nullcontext() if self.units is None or self.units.packs is None else self.units.packs.running()


@dataclass(frozen=True, eq=False)
class TrainerStep:
    """One optimizer step of a Trainer, all batches of which have come: as a run without evenload has it, or planned."""

    state: PlannedTrainer
    trainer: Any
    model: Any
    """As the Trainer hands it to ``training_step``."""
    call: Callable[..., Tensor]
    """The Trainer's own ``training_step`` of a batch and its number of targets."""
    batches: list[TakenBatch]

    @property
    def last(self) -> TakenBatch:
        return self.batches[-1]

    @property
    def inner(self) -> Any:
        """The Hugging Face model inside what is trained."""
        return inner_model(self.trainer)

    def run_stock(self, *, hooked: bool = False) -> Tensor:
        """This rank's loss of the batches one by one, their rows without padding where that is exact. Collective.

        Args:
            hooked: hooks on parameters are watched; where one is not linear, all later steps run as they are, too.
        """
        state, loss = self.state, torch.zeros((), device=self.trainer.args.device)
        with state.unpadded():
            for number, one in enumerate(self.batches, 1):
                with reducing(self.trainer.accelerator, self.model, number == len(self.batches)):
                    loss = loss + self.call(one.inputs, one.num_items)
        try:
            if hooked:
                state.hooks.refuse_unlike()
        except EvenloadError as error:
            LoopSession(name=NAME).leave(error)
            state.stays = True
        return loss

    def plan(self, samples: GlobalBatch[Any]) -> StepPlan | None:
        """The plan of these samples; None where a stock run is as good. Collective."""
        state = self.state
        plan = state.plan_unless_even(samples)
        if plan is None:
            log.info("step %d: %d samples of one length run as they are", state.steps, len(samples.lengths))
        else:
            slots = sum(slots_of(one.inputs) for one in self.batches)
            log_step(state.steps, plan, slots // (state.units.num_rows if state.units else 1))
        return plan

    def plan_trees(self, samples: GlobalBatch[Any], branches: Sequence[Branch]) -> StepPlan:
        """The plan of samples that begin alike. Collective."""
        plan = self.state.plan(samples.lengths, lambda chain, lengths: plan_shared(chain, lengths, branches))
        tokens = int(samples.lengths.sum())
        log.info("step %d: %d tokens, %d of them computed", self.state.steps, tokens, plan.num_tokens)
        return plan

    def say_no_trees(self, why: str) -> None:
        """Say, where trees are asked for, that the first step has none."""
        if rank_and_size()[0] == 0:
            warn_of_no_trees(self.state.recipe, why)

    def run_plan(
        self,
        plan: StepPlan,
        call: Callable[[dict[str, Any]], Tensor],
        samples: Mapping[int, Any],
        inputs_of: Callable[[Pack], dict[str, Any]],
        *,
        hooked: bool,
        packed: StepPlan | None = None,
    ) -> Tensor:
        """This rank's loss of the step by its plan. Collective.

        Args:
            call: the Trainer's own ``training_step`` of a micro-batch.
            samples: tokens and labels [2, L] of what this rank computes, by number.
            inputs_of: the arguments of the model's call for a micro-batch.
            hooked: gradients of parameters go through hooks on some rank.
            packed: the Trainer's own step, where its rows hold several samples.
        """
        state, trainer, (rank, _) = self.state, self.trainer, rank_and_size()
        plane, program = state.plane_of(plan, _whole_world), closed(plan, rank)
        num_backwards = sum(action.kind == "backward" for action in program)
        stage = TrainerStage(
            trainer,
            self.model,
            call,
            samples=samples,
            plane=plane,
            num_backwards=num_backwards,
            inputs_of=inputs_of,
            shares=state.shares,
        )
        weighed = nullcontext() if state.loss is None else state.loss.within(self.inner)
        shared = nullcontext() if state.shares is None else state.shares.running()
        with shared, stage.guarded(entered_module(trainer.accelerator, trainer.model)), weighed:
            run_program(plan, program, stage, Position(0, rank, plane=plane), BusyClock(stage.device))
        if state.shares is not None and (saved := state.shares.num_saved):
            log.info(
                "until step %d: %d tokens that samples of a pack begin with were computed once", state.steps, saved
            )
        elif state.shares is not None and state.steps == 1:
            self.say_no_trees("no samples of a pack begin alike")
        if hooked:
            state.hooks.refuse_unlike()
        state.report(plan, packed=packed)
        return stage.loss


def leave_unplanned(state: PlannedTrainer, why: EvenloadError, padded: str | None) -> None:
    """Leave a Trainer's rows where they are, and say why, and why they are padded; None: they are not."""
    state.stays = padded is not None
    report_idle(NAME, f"{why.what} ({why.found}; {padded or 'their padding is not computed'})", STOCK)
