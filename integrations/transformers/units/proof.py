"""Whether units change micro-batches exactly under a live loss: measured before the first update, as packs are.

Two short units stand in one batch and are compared with each alone: the loss, times its units, is to be the sum of
both, and so the gradient at the input embeddings. Where a run begins, the policy is its own reference: log-ratios are
0, and means and penalties of a whole batch with them. So the weights are moved to both sides meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ....core.errors import EvenloadError
from ....runtime.world.agreement import everyone
from ...huggingface.units import Unit, UnitForm, batch_of
from ..conditions import as_if_without_dropout, twin_of
from ..proof import Call, Measurement, Proof, ProofRun, difference, prove
from ..supported import entered_module, inner_model

_LENGTHS, _ANSWERS = (7, 12), (2, 5)
"""Tokens of the first row of each unit, and those that are its answer: unlike, so that a mean of them differs."""
_PADDING = 3
"""Slots beyond the longest row, so that every one has padding."""
_MOVED = 1 << 20
"""Entries of weights that are moved at least, where there are so many: small weights first, which are copied."""
_STEP = 0.1
"""How far, over the mean size of a weight's entries; for one of zeros, a fifth of this itself."""


def short_units(units: Sequence[Unit]) -> list[Unit]:
    """Two short units out of those of all ranks. Collective."""
    pairs = zip((*units[:2], *units[:1]), _LENGTHS, _ANSWERS, strict=False)
    own = [unit.shortened(most, answer) for unit, most, answer in pairs]
    of_all = sorted(everyone([unit.to_bytes() for unit in own]), key=len, reverse=True)
    first, second = (Unit.of_bytes(content) for content in of_all[0])
    if first.length == second.length > 2:  # rows of one length would hide what padding and means do
        second = second.shortened(first.length - 1)
    return [first, second]


def prove_units(trainer: Any, units: Sequence[Unit], row: Mapping[str, Any], form: UnitForm) -> Proof:
    """Measure units of a Trainer's batches by its ``compute_loss``, on a copy of the Trainer. Collective.

    Args:
        units: two of `short_units`.
        row: a batch of the script's own.
    """
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)

    def compute(batch: dict[str, Any], times: float) -> Call:
        count = len(batch["input_ids"]) // form.num_rows
        with twin.compute_loss_context_manager():
            loss = twin.compute_loss(model, twin._prepare_inputs(batch))
        return Call(loss * count * times, None)

    class OfUnits(Measurement):
        """Two units in one batch against each alone."""

        noun = "a batch"

        def proof(self) -> Proof:
            with ExitStack() as stack:
                stack.enter_context(as_if_without_dropout(self._model, self._device))
                seen = set()
                for side in (1.0, -1.0):
                    with moved(trainer.model, side):
                        alone = [self._run(batch_of([unit], form, self._device)) for unit in units]
                        together = self._run(batch_of(units, form, self._device, _PADDING + _longest(units)))
                    self._refuse_other_losses(alone, together, is_divided=True)
                    seen.add((together.loss, *(float(one.norm()) for one in together.gradients)))
                if len(seen) == 1:
                    raise EvenloadError(
                        "units are tried beside the point where training begins",
                        f"the loss of a {type(self._model).__name__} stays {together.loss:.6g} when weights are moved",
                    )
            return Proof(None)

        def _off(self, together: Tensor, alone: list[Tensor]) -> float:
            parts = []
            for number, own in enumerate(alone):
                slots = own.shape[1]
                rows = together[number :: len(alone)]
                parts.append(rows[:, rows.shape[1] - slots :] if form.left else rows[:, :slots])
            flat = [torch.cat([one.flatten(0, 1) for one in of]) for of in (parts, alone)]
            return float("inf") if not bool(flat[1].any()) else difference(*flat)

        def _other_tokens(self, packed: ProofRun, what: str, off: float) -> EvenloadError:
            return EvenloadError(
                "a loss that is not the mean of its units'",
                f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
            )

    half = trainer.args.bf16 or trainer.args.fp16
    entered = entered_module(trainer.accelerator, trainer.model)
    return prove(inner_model(trainer), [], row, compute, half=half, entered=entered, kind=OfUnits)


def _longest(units: Sequence[Unit]) -> int:
    return max(unit.length for unit in units)


@contextmanager
def moved(model: Any, side: float) -> Iterator[None]:
    """Inside, weights that are trained lie a little to one side of where they are."""
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())
    kept: list[tuple[Tensor, Tensor]] = []
    entries = 0
    with torch.no_grad():
        for parameter in trained:
            if entries >= _MOVED:
                break
            own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            kept.append((own, own.clone()))
            entries += own.numel()
            size = _STEP * float(own.abs().mean()) if own.numel() else 0.0
            waves = torch.arange(own.numel(), device=own.device).sin().view(own.shape)
            own.add_(side * (size or _STEP / 5) * waves.to(own.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for own, value in kept:
                own.copy_(value)
