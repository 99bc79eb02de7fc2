"""Whether units change micro-batches exactly under a live loss, and whether rows that stay where they are can be
computed without padding: measured before the first update, as packs are.

Two short units stand in one batch and are compared with each alone: the loss, times its units, is to be the sum of
both, and so the gradient at the input embeddings. Where a run begins, the policy is its own reference: log-ratios are
0, and means and penalties of a whole batch with them. So the weights are moved to both sides meanwhile.

Of rows that stay, the script's own batch runs with calls as packs and with calls as they are; and so does a batch whose
rows begin alike, before what they share is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....core.errors import EvenloadError
from ....runtime.attributes import with_attributes
from ....runtime.world.agreement import everyone
from ...huggingface.units import Unit, UnitForm, batch_of, mask_of
from ..conditions import twin_of
from ..pack_call import PackCalls, PackedRows
from ..proof import (
    STOCK,
    Batch,
    Call,
    Experiment,
    ProbeModel,
    Proof,
    ProofRun,
    by_embedding,
    difference,
    probe_of,
    prove,
)

_LENGTHS, _ANSWERS = (7, 12), (2, 5)
"""Tokens of the first row of each unit, and those that are its answer: unlike, so that a mean of them differs."""
_PADDING = 3
"""Slots beyond the longest row, so that every one has padding."""

_LEAST_LOSS = 0.1
"""Below it the loss of rows that stay is compared with this: centred advantages have a loss of rounding alone."""

_NO_WEIGHT = (0.5, -1.0)
"""What stands for a value of 0: an advantage of it would hide what a unit does."""


def short_units(units: Sequence[Unit]) -> list[Unit]:
    """Two units out of those of all ranks, short and of unlike lengths. Collective.

    Generated ones stay whole, so that log-probabilities that they bring are those of their tokens. Raises EvenloadError
    where all of these have one token.
    """
    if units and units[0].is_generated:
        own = sorted(units, key=lambda unit: max(unit.sizes))
        own = [own[0], next((unit for unit in own if max(unit.sizes) > max(own[0].sizes)), own[-1])]
    else:
        pairs = zip((*units[:2], *units[:1]), _LENGTHS, _ANSWERS, strict=False)
        own = [unit.shortened(most, answer) for unit, most, answer in pairs]
    of_all = sorted(everyone([unit.to_bytes() for unit in own]), key=len, reverse=True)
    first, second = (Unit.of_bytes(content) for content in of_all[0])
    size = max(second.sizes)
    if max(first.sizes) == size:  # rows of one length would hide what padding and means do
        if second.is_generated and size == 1:
            raise EvenloadError("units are tried by two of unlike lengths", "completions of one token each", STOCK)
        second = second.shortened(size - 1) if size > 2 or second.is_generated else second
    for unit, value in zip((first, second), _NO_WEIGHT, strict=True):
        for key, one in unit.values.items():
            unit.values[key] = torch.full_like(one, value) if one.is_floating_point() and not bool(one) else one
    return [first, second]


def prove_units(
    trainer: Any,
    units: Sequence[Unit],
    row: Mapping[str, Any],
    form: UnitForm,
    *,
    of_mean: bool,
    packs: PackCalls | None,
) -> Proof:
    """Measure units of a Trainer's batches by its ``compute_loss``, on a copy of the Trainer. Collective.

    Args:
        units: two of `short_units`.
        row: a batch of the script's own.
        of_mean: the loss is to be the mean of the units'; else their sum.
        packs: several units are computed without padding by these; each alone as it is.
    """
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)

    def compute(batch: Batch, times: float) -> Call:
        count = len(mask_of(batch)) // form.num_rows
        with twin.compute_loss_context_manager():
            loss = twin.compute_loss(model, batch)
        return Call(loss * (count if of_mean else 1) * times, None)

    pair, sides = UnitPair(units, form, of_mean), (0.0, 1.0, -1.0) if units[0].is_generated else (1.0, -1.0)
    within = packs.running if packs else nullcontext
    experiment = Experiment("a batch", pair.stock, pair.planned, pair.compare, sides, pair.conclude, within)
    return prove(experiment, probe_of(trainer, row, compute))


@dataclass(frozen=True, eq=False)
class UnitPair:
    """Two short units, each as a batch of its own, and both in one."""

    units: Sequence[Unit]
    form: UnitForm
    of_mean: bool
    """The loss is to be the mean of the units'; else their sum."""

    def stock(self, probe: ProbeModel) -> list[ProofRun]:
        return [probe.run(batch_of([unit], self.form, probe.device)) for unit in self.units]

    def planned(self, probe: ProbeModel) -> Batch:
        return batch_of(self.units, self.form, probe.device, _PADDING)

    def compare(self, probe: ProbeModel, alone: list[ProofRun], together: ProofRun) -> Proof:
        probe.refuse_state()
        probe.refuse_other_sum("a batch", alone, together)
        off = max(self._off(*gradients) for gradients in by_embedding(together, alone))
        why = f"a loss that is not the {'mean' if self.of_mean else 'sum'} of its units'"
        probe.refuse_far(why, "gradients at the embeddings", off)
        return Proof(None)

    def conclude(self, probe: ProbeModel, runs: Sequence[ProofRun]) -> None:
        seen = {(run.loss, *(float(one.norm()) for one in run.gradients)) for run in runs}
        if len(seen) == 1 or not any(any(norms) for _, *norms in seen):
            raise EvenloadError(
                "units are tried away from the point where training begins",
                f"the loss of a {probe.name} stays {runs[-1].loss:.6g} when weights are moved",
            )

    def _off(self, together: Tensor, alone: list[Tensor]) -> float:
        masks = [mask_of(batch_of([unit], self.form, together.device)) for unit in self.units]
        rows = [_rows(one, mask) for one, mask in zip(alone, masks, strict=True)]
        wanted = torch.cat([of_unit[place] for place in range(self.form.num_rows) for of_unit in rows])
        own = torch.cat(_rows(together, mask_of(batch_of(self.units, self.form, together.device, _PADDING))))
        if not bool(wanted.any()):  # clipped, as no update has them
            return float("inf") if bool(own.any()) else 0.0
        return difference(own, wanted)


def forked_units(units: Sequence[Unit]) -> list[Unit]:
    """Units with the rows of the first one's first, but for some last tokens of each, and with their own values."""
    return [unit.forked(units[0], number * len(unit.rows)) for number, unit in enumerate(units)]


def forked_batch(row: Mapping[str, Any]) -> dict[str, Any]:
    """A padded batch whose rows begin as its first one does, but for some last tokens of each."""
    tokens_RT, mask_RT = row.get("input_ids"), row.get("attention_mask")
    if not isinstance(tokens_RT, Tensor) or not isinstance(mask_RT, Tensor) or mask_RT.shape != tokens_RT.shape:
        return dict(row)
    forked_RT, first = tokens_RT.clone(), tokens_RT[0][mask_RT[0].bool()]
    for number, (own, mask) in enumerate(zip(forked_RT, mask_RT, strict=True)):
        places = mask.nonzero().flatten()
        size = max(0, min(len(places), len(first)) - number)
        own[places[:size]] = first[:size]
    return {**row, "input_ids": forked_RT}


def prove_trees(trainer: Any, packs: PackCalls, row: Mapping[str, Any], num_items: Any) -> Proof:
    """`prove_calls` where what rows begin with in common is computed once; some rows of the batch have to."""
    with with_attributes(packs, trees=True):
        return prove_calls(trainer, packs, row, num_items)


def prove_calls(trainer: Any, packs: PackCalls, row: Mapping[str, Any], num_items: Any) -> Proof:
    """Measure packed calls of a Trainer's models by its ``compute_loss``, on a copy of the Trainer. Collective.

    Args:
        row: a batch of the script's own, as its model gets it.
        num_items: what the Trainer divides by, as it counts it.
    """
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)
    packed: list[PackedRows] = []

    def compute(batch: Batch, times: float) -> Call:
        with twin.compute_loss_context_manager():
            loss = twin.compute_loss(model, batch, num_items_in_batch=num_items)
        return Call(loss * times, None)

    def stock(probe: ProbeModel) -> list[ProofRun]:
        packed.clear()
        return [probe.run(dict(row))]

    def compare(probe: ProbeModel, as_it_is: list[ProofRun], own: ProofRun) -> Proof:
        (wanted,), rows, why = as_it_is, list(packed), "rows are computed otherwise without padding"
        probe.refuse_far(why, "the loss", abs(own.loss - wanted.loss) / max(abs(wanted.loss), _LEAST_LOSS))
        for of_own, (of_stock,) in by_embedding(own, as_it_is):
            if rows and of_own.shape[:2] == (1, rows[0].num_tokens):
                of_call = rows.pop(0)._replace(shifted=False)
                of_own, of_stock = of_call.rows_of(of_own), of_call.added_up(of_stock)
            probe.refuse_far(why, "gradients", difference(of_own.flatten(0, 1), of_stock.flatten(0, 1)))
        return Proof(None)

    def conclude(probe: ProbeModel, runs: Sequence[ProofRun]) -> None:
        if not packed:
            raise EvenloadError("no call of its model has rows that can be packed", "calls without a mask")
        if packs.trees and not any(one.trie for one in packed):
            raise EvenloadError("no rows of a batch begin alike", f"{len(packed)} calls of its model")

    within, planned = partial(packs.running, packed), lambda probe: dict(row)
    rows = Experiment("rows without padding", stock, planned, compare, (0.0, 1.0), conclude, within)
    return prove(rows, probe_of(trainer, row, compute))


def _rows(gradient: Tensor, mask_RT: Tensor) -> list[Tensor]:
    """What lies under each row [L, H], out of padded rows [R, T, H] or a pack of them [1, N, H]."""
    flat_NH = gradient[mask_RT.bool()] if gradient.shape[:2] == mask_RT.shape else gradient[0]
    return list(torch.split(flat_NH, mask_RT.bool().sum(1).tolist()))
