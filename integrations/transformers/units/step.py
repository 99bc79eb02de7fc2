"""The step of a Trainer whose units change micro-batches and ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from ....core.errors import EvenloadError
from ...huggingface.units import BrokenUnitsError, batch_of
from ..pack_call import PackCalls
from ..planned import TrainerStep, UnitLoop, leave_unplanned
from ..planning import chain_of
from ..supported import dropouts_fault, virtual_tokens, warn_of_dropout
from .batches import gather_units
from .call import UnitCall
from .proof import forked_batch, forked_units, prove_calls, prove_trees, prove_units, short_units

log = logging.getLogger("evenload")


def run_units(step: TrainerStep, units: UnitLoop) -> Tensor:
    """All passes of this rank in a step whose units change micro-batches; the loss that the Trainer books.
    Collective."""
    state, trainer = step.state, step.trainer
    if not units.is_measured:
        _measure(step, units)
    if units.filler is None:
        return step.run_stock()
    read, hooked = [one.reading() for one in step.batches], state.hooks.watch(step.inner)
    try:
        packs = units.packs
        batch = gather_units(read, packs=packs is not None, trees=packs is not None and packs.trees, hooked=hooked)
    except EvenloadError as error:
        if isinstance(error, BrokenUnitsError):
            state.leave(error)
        log.info("step %d runs as it is: %s", trainer.state.global_step + 1, error.found)
        return step.run_stock()
    if (batch.divisor is None and units.of_mean) or not batch.is_one_step:
        log.info("step %d runs as it is: its batches are not divided alike", trainer.state.global_step + 1)
        return step.run_stock()
    if batch.hooked and not state.hooks.are_known:
        return step.run_stock(hooked=True)
    if not state.steps and units.packs is not None and units.packs.trees and not batch.shares:
        step.say_no_trees("no rows of it begin alike")
    try:
        plan = step.plan_trees(batch.samples, batch.branches) if batch.shares else step.plan(batch.samples)
    except EvenloadError as error:
        state.leave(error)
        plan = None
    if plan is None:
        return step.run_stock()
    here, lengths = batch.exchange(plan), plan.lengths.tolist()
    own = UnitCall(trainer, step.call, here, units.filler, batch.form, batch.divisor if units.of_mean else None)
    # The plan's pack of a unit is never read: the Trainer makes rows of it.
    samples = {number: np.zeros((2, lengths[number]), dtype=np.int64) for number in here}
    with state.unpadded():
        loss = step.run_plan(plan, own, samples, own.inputs_of, hooked=batch.hooked)
    own.book(len(step.batches))
    return loss


def _measure(step: TrainerStep, units: UnitLoop) -> None:
    """Find out, before the first update, what is exact: units that change micro-batches, or rows that stay where they
    are without padding. Collective."""
    packs, why = PackCalls(step.trainer), units.why
    units.is_measured = True
    if why is None:
        try:
            _measure_units(step, units, packs)
            return
        except BrokenUnitsError as error:  # what the script makes of such rows is its own affair
            leave_unplanned(step.state, error, "not measured")
            return
        except EvenloadError as error:
            why = error
    fault = prove_calls(step.trainer, packs, step.last.inputs, step.last.num_items).fault
    if fault is None:
        units.packs = packs
        _measure_trees(step, packs, forked_batch(step.last.inputs))
    leave_unplanned(step.state, why, f"without padding: {fault.what}, {fault.found}" if fault else None)


def _measure_trees(step: TrainerStep, packs: PackCalls, row: Mapping[str, Any]) -> None:
    """Find out whether what rows begin with in common can be computed once: of a batch in which some do. Collective."""
    if not step.state.recipe.trees:
        return
    fault = dropouts_fault(step.inner) or prove_trees(step.trainer, packs, row, step.last.num_items).fault
    packs.trees = fault is None
    if fault is not None:
        log.info("each row computes all of its tokens: %s (%s)", fault.what, fault.found)
        step.say_no_trees(f"{fault.what} ({fault.found})")


def _measure_units(step: TrainerStep, units: UnitLoop, packs: PackCalls) -> None:
    """Find out how units are exact. Raises EvenloadError, on all ranks, where they are not."""
    trainer, first = step.trainer, virtual_tokens(step.trainer.model)
    if first is not None:
        raise first
    batch = gather_units([one.reading() for one in step.batches], packs=True, hooked=False)
    pair = short_units(step.last.reading().units)
    for calls, of_mean in product((packs, None) if packs.is_any else (None,), (True, False)):
        fault = prove_units(trainer, pair, step.last.inputs, batch.form, of_mean=of_mean, packs=calls).fault
        if fault is None:
            warn_of_dropout(step.inner)
            rows = 0 if calls else batch.form.num_rows
            step.state.chain = chain_of(step.state.recipe, trainer, whole=True, rows=rows)
            units.of_mean = of_mean
            units.filler = pair[0].shortened(2)
            units.packs = calls
            if calls:
                _measure_trees(step, calls, batch_of(forked_units(pair), batch.form, trainer.args.device))
            return
        first = first or fault
    assert first is not None
    raise first
