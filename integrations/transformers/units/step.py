"""The step of a Trainer whose units change micro-batches and ranks."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ....core.errors import EvenloadError
from ....core.planning.chain import PlanChain
from ...unmodified.planned_loop import PlannedLoop
from ..planned import NAME, PlannedTrainer, carried_out, plan_of, stays
from ..planning import chain_of
from ..stage import StepPasses, TakenBatch, run_stock
from ..supported import inner_model, virtual_tokens, warn_of_dropout
from .batches import UnitBatch, gather_units
from .call import UnitCall
from .proof import prove_units, short_units

log = logging.getLogger("evenload")


def run_units(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """`_run` where units change micro-batches."""
    inner = inner_model(trainer)
    try:
        batch = gather_units([one.reading() for one in taken], hooked=state.hooks.watch(inner))
    except EvenloadError as error:
        stays(state, error)
        return run_stock(trainer, model, taken, call)
    if batch.divisor is None:
        log.info("step %d runs as it is: its batches have unlike numbers of units", trainer.state.global_step + 1)
        return run_stock(trainer, model, taken, call)
    if state.planning is None:
        try:
            state.planning = PlannedLoop(NAME, _measured_units(state, trainer, batch, taken[-1]))
        except EvenloadError as error:
            stays(state, error)
            return run_stock(trainer, model, taken, call)
    plan = plan_of(state, batch.samples, taken)
    if plan is None:
        return run_stock(trainer, model, taken, call)
    assert state.idle is not None
    units = batch.exchange(plan)
    own = UnitCall(trainer, call, units, state.idle, batch.form, batch.divisor)
    samples = {number: unit.longest for number, unit in units.items()}
    loss = carried_out(state, trainer, model, plan, StepPasses(own, samples, own.inputs_of, batch.hooked))
    own.book(len(taken))
    return loss


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
