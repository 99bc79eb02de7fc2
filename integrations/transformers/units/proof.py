"""Whether units change micro-batches exactly under a live loss: measured before the first update, as packs are.

Two short units stand in one batch and are compared with each alone: the loss, times its units, is to be the sum of
both, and so the gradient at the input embeddings. Where a run begins, the policy is its own reference: log-ratios are
0, and means and penalties of a whole batch with them. So the weights are moved to both sides meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from ....core.errors import EvenloadError
from ....runtime.world.agreement import everyone
from ...huggingface.units import Unit, UnitForm, batch_of, mask_of
from ..conditions import as_if_without_dropout, moved, twin_of
from ..pack_call import PackCalls
from ..proof import STOCK, Call, Measurement, Proof, ProofRun, difference, prove
from ..supported import entered_module, inner_model

_LENGTHS, _ANSWERS = (7, 12), (2, 5)
"""Tokens of the first row of each unit, and those that are its answer: unlike, so that a mean of them differs."""
_PADDING = 3
"""Slots beyond the longest row, so that every one has padding."""

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

    def compute(batch: dict[str, Any], times: float) -> Call:
        count = len(mask_of(batch)) // form.num_rows
        packed = packs is not None and count > 1
        with twin.compute_loss_context_manager(), packs.running() if packs and packed else nullcontext():
            loss = twin.compute_loss(model, batch)
        return Call(loss * (count if of_mean else 1) * times, None)

    kind = _units_like(trainer.model, units, form, of_mean)
    half = trainer.args.bf16 or trainer.args.fp16
    entered = entered_module(trainer.accelerator, trainer.model)
    return prove(inner_model(trainer), [], row, compute, half=half, entered=entered, kind=kind)


def _units_like(model: Any, units: Sequence[Unit], form: UnitForm, of_mean: bool) -> type[Measurement]:
    """What measures these units in one batch, the weights of a model moved meanwhile."""

    class OfUnits(Measurement):
        """Two units in one batch against each alone."""

        noun = "a batch"

        def proof(self) -> Proof:
            with ExitStack() as stack:
                changed = stack.enter_context(as_if_without_dropout(self._model, self._device))
                seen, flows = set(), False
                for side in (0.0, 1.0, -1.0) if units[0].is_generated else (1.0, -1.0):
                    with moved(model, side):
                        alone = [self._run(batch_of([unit], form, self._device)) for unit in units]
                        together = self._run(batch_of(units, form, self._device, _PADDING))
                    self._refuse_state(changed)
                    self._refuse_other_losses(alone, together, is_divided=True)
                    norms = [float(one.norm()) for one in together.gradients]
                    flows = flows or any(norms)
                    seen.add((together.loss, *norms))
                if len(seen) == 1 or not flows:
                    raise EvenloadError(
                        "units are tried beside the point where training begins",
                        f"the loss of a {type(self._model).__name__} stays {together.loss:.6g} when weights are moved",
                    )
            return Proof(None)

        def _off(self, together: Tensor, alone: list[Tensor]) -> float:
            masks = [mask_of(batch_of([unit], form, together.device)) for unit in units]
            rows = [_rows(one, mask) for one, mask in zip(alone, masks, strict=True)]
            wanted = torch.cat([of_unit[place] for place in range(form.num_rows) for of_unit in rows])
            own = torch.cat(_rows(together, mask_of(batch_of(units, form, together.device, _PADDING))))
            if not bool(wanted.any()):  # clipped, as no update has them
                return float("inf") if bool(own.any()) else 0.0
            return difference(own, wanted)

        def _other_tokens(self, packed: ProofRun, what: str, off: float) -> EvenloadError:
            return EvenloadError(
                f"a loss that is not the {'mean' if of_mean else 'sum'} of its units'",
                f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
            )

    return OfUnits


def _rows(gradient: Tensor, mask_RT: Tensor) -> list[Tensor]:
    """What lies under each row [L, H], out of padded rows [R, T, H] or a pack of them [1, N, H]."""
    flat_NH = gradient[mask_RT.bool()] if gradient.shape[:2] == mask_RT.shape else gradient[0]
    return list(torch.split(flat_NH, mask_RT.bool().sum(1).tolist()))
