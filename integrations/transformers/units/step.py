"""The step of a Trainer whose units change micro-batches and ranks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from ....core.errors import EvenloadError
from ...huggingface.units import BrokenUnitsError
from ...unmodified.planned_loop import PlannedLoop, leave
from ..pack_call import PackCalls
from ..planned import NAME, MeasuredUnits, PlannedTrainer, carried_out, plan_of, stays, watching_hooks
from ..planning import chain_of
from ..stage import StepPasses, TakenBatch, run_stock
from ..supported import inner_model, virtual_tokens, warn_of_dropout
from .batches import gather_units
from .call import UnitCall
from .in_place import prove_calls
from .proof import prove_units, short_units

log = logging.getLogger("evenload")


def run_units(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """All passes of this rank in a step whose units change micro-batches; the loss that the Trainer books. Collective.

    Args:
        call: the Trainer's own ``training_step`` of a batch.
    """
    inner = inner_model(trainer)
    if state.units is None and not state.in_place:
        _measure(state, trainer, taken)
    if state.in_place or state.units is None:
        return run_in_place(state, trainer, model, taken, call)
    measured = state.units
    read, hooked = [one.reading() for one in taken], state.hooks.watch(inner)
    try:
        batch = gather_units(read, packs=measured.packs is not None, hooked=hooked)
    except EvenloadError as error:
        if isinstance(error, BrokenUnitsError):
            leave(NAME, state.planning, error)
        log.info("step %d runs as it is: %s", trainer.state.global_step + 1, error.found)
        return run_in_place(state, trainer, model, taken, call)
    if (batch.divisor is None and measured.of_mean) or not batch.is_one_step:
        log.info("step %d runs as it is: its batches are not divided alike", trainer.state.global_step + 1)
        return run_in_place(state, trainer, model, taken, call)
    if batch.hooked and not state.hooks.are_known:
        return watching_hooks(state, lambda: run_in_place(state, trainer, model, taken, call))
    try:
        plan = plan_of(state, batch.samples, taken)
    except EvenloadError as error:
        leave(NAME, state.planning, error)
        plan = None
    if plan is None:
        return run_in_place(state, trainer, model, taken, call)
    units = batch.exchange(plan)
    own = UnitCall(trainer, call, units, measured.idle, batch.form, batch.divisor if measured.of_mean else None)
    lengths = plan.lengths.tolist()
    # The plan's pack of a unit is never read: the Trainer makes rows of it.
    samples = {number: np.zeros((2, lengths[number]), dtype=np.int64) for number in units}
    with nullcontext() if measured.packs is None else measured.packs.running():
        loss = carried_out(state, trainer, model, plan, StepPasses(own, samples, own.inputs_of, batch.hooked))
    own.book(len(taken))
    return loss


def run_in_place(state: PlannedTrainer, trainer: Any, model: Any, taken: list[TakenBatch], call: Any) -> Tensor:
    """The batches of a step one by one, their rows without padding where that is exact. Collective."""
    with nullcontext() if state.packs is None else state.packs.running():
        return run_stock(trainer, model, taken, call)


def _measure(state: PlannedTrainer, trainer: Any, taken: list[TakenBatch]) -> None:
    """Find out, before the first update, what is exact: units that change micro-batches, or rows that stay where they
    are without padding. Collective."""
    packs = PackCalls(trainer)
    why = state.in_place_why
    if why is None:
        try:
            state.units = _measured_units(state, trainer, packs, taken)
            state.packs = state.units.packs
            return
        except BrokenUnitsError as error:  # what the script makes of such rows is its own affair
            state.in_place = True
            stays(state, error, "not measured")
            return
        except EvenloadError as error:
            why = error
    state.in_place = True
    fault = prove_calls(trainer, packs, taken[-1].inputs, taken[-1].num_items).fault
    state.packs = None if fault else packs
    stays(state, why, f"without padding: {fault.what}, {fault.found}" if fault else None)


def _measured_units(state: PlannedTrainer, trainer: Any, packs: PackCalls, taken: list[TakenBatch]) -> MeasuredUnits:
    """What units are exact. Raises EvenloadError, on all ranks, where none are."""
    fault = virtual_tokens(trainer.model)
    if fault is not None:
        raise fault
    batch = gather_units([one.reading() for one in taken], packs=True, hooked=False)
    units = short_units(taken[-1].reading().units)
    first: EvenloadError | None = None
    for calls, of_mean in product((packs, None) if packs.is_any else (None,), (True, False)):
        fault = prove_units(trainer, units, taken[-1].inputs, batch.form, of_mean=of_mean, packs=calls).fault
        if fault is None:
            warn_of_dropout(inner_model(trainer))
            rows = 0 if calls else batch.form.num_rows
            state.planning = PlannedLoop(NAME, chain_of(state.recipe, trainer, whole=True, rows=rows))
            return MeasuredUnits(of_mean, units[0].shortened(2), calls)
        first = first or fault
    assert first is not None
    raise first
