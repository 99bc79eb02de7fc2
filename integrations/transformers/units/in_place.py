"""Whether rows that stay where they are can be computed without padding, by a Trainer's own batch before its first
update: its loss and the gradient at the input embeddings, with calls as packs against calls as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from ....core.errors import EvenloadError
from ..conditions import as_if_without_dropout, moved, twin_of
from ..pack_call import PackCalls
from ..proof import Call, Measurement, Proof, difference, prove
from ..supported import entered_module, inner_model

_LEAST_LOSS = 0.1
"""Below it the loss is compared with this: centred advantages have a loss of rounding alone."""


def prove_calls(trainer: Any, packs: PackCalls, row: Mapping[str, Any], num_items: Any) -> Proof:
    """Measure packed calls of a Trainer's models by its ``compute_loss``, on a copy of the Trainer. Collective.

    Args:
        row: a batch of the script's own, as its model gets it.
        num_items: what the Trainer divides by, as it counts it.
    """
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)
    packed = False

    def compute(batch: dict[str, Any], times: float) -> Call:
        with twin.compute_loss_context_manager(), packs.running() if packed else nullcontext():
            loss = twin.compute_loss(model, batch, num_items_in_batch=num_items)
        return Call(loss * times, None)

    class OfCalls(Measurement):
        """A batch whose calls are packs against the same as it is."""

        noun = "rows without padding"

        def proof(self) -> Proof:
            nonlocal packed
            with ExitStack() as stack:
                stack.enter_context(as_if_without_dropout(self._model, self._device))
                for side in (0.0, 1.0):
                    with moved(trainer.model, side):
                        packed = False
                        stock = self._run(dict(self._row))
                        packed, packs.seen = True, []
                        own = self._run(dict(self._row))
                        seen, packs.seen = packs.seen or [], None
                    self._refuse("the loss", abs(own.loss - stock.loss) / max(abs(stock.loss), _LEAST_LOSS))
                    rows = list(seen)
                    for of_stock, of_own in zip(stock.gradients, own.gradients, strict=True):
                        if rows and of_own.shape[:2] == (1, len(rows[0].slots_N)):
                            of_own = rows.pop(0)._replace(shifted=False).rows_of(of_own)
                        self._refuse("gradients", difference(of_own.flatten(0, 1), of_stock.flatten(0, 1)))
            if not seen:
                raise EvenloadError("no call of its model has rows that can be packed", "calls without a mask", "")
            return Proof(None)

        def _refuse(self, what: str, off: float) -> None:
            if not off <= self._tolerance:
                raise EvenloadError(
                    "rows are computed otherwise without padding",
                    f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
                    "",
                )

    half = trainer.args.bf16 or trainer.args.fp16
    entered = entered_module(trainer.accelerator, trainer.model)
    return prove(inner_model(trainer), [], row, compute, half=half, entered=entered, kind=OfCalls)
