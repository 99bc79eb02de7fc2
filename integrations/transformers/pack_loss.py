"""The loss of packs in a loop that takes means of its own batches, from the model's forward to the loop's backward.

A planned forward gives the sum of its weighted token losses. Gradients are linear in it, so a loop may multiply it by a
constant and add others of its kind to it; that it does nothing else is measured where the sum comes to its backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.errors import EvenloadError, refuse_first
from ...core.plan.step_plan import StepPlan
from ...runtime.attention.pack import IGNORE, Pack
from ...runtime.experts.weights import of_slots
from ...runtime.world.agreement import everyone
from ..huggingface import attention
from ..huggingface.inputs import OfPack

_MOST_WAITING = 16
"""Planned forwards that may wait for a backward; those before them have none."""


class WaitingLoss(NamedTuple):
    """The loss of a planned forward whose backward is to come."""

    loss: Tensor
    plan: StepPlan | None
    """None: the loop's own batch is watched."""
    packed: StepPlan | None
    """The loop's own step, where its rows hold several samples."""


class PackLoss:
    """A model's loss function: its own, and on a pack the sum of weighted token losses."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        self.weights_1T: Tensor | None = None
        """What each token's loss counts [1, T] in the planned forward that runs, until its loss is computed."""
        self.plan: StepPlan | None = None
        """Of that forward; None where nothing is trained."""
        self.packed: StepPlan | None = None
        """See `WaitingLoss`."""
        self.strayed: Callable[[EvenloadError], None] | None = None
        """Losses of the loop's own batches are watched, and this is called where one comes to a backward that is not
        the Accelerator's; None: nothing is watched."""
        self._waiting: deque[WaitingLoss] = deque(maxlen=_MOST_WAITING)
        self._slopes: dict[str | int, Tensor] | None = None
        """Gradients that have come to the loop's loss ("loss") and to planned ones (by their `id`), in a backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.weights_1T is None:
            loss: Tensor = self.stock(*args, **kwargs)
            if self.strayed is not None:
                self._wait(loss)
            return loss
        weights_T, self.weights_1T = self.weights_1T[0], None
        logits_TV, labels_T = kwargs["logits"][0], kwargs["shift_labels"][0]
        wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        losses_T = cross_entropy(wide, labels_T, ignore_index=IGNORE, reduction="none")
        loss = (losses_T * weights_T.to(losses_T.dtype)).sum()
        if self.plan is not None:
            self._wait(loss)
        return loss

    def _wait(self, loss: Tensor) -> None:
        """Have a backward to come say what of its loss this one is."""
        if loss.requires_grad:
            number = id(loss)
            loss.register_hook(lambda slope: self._note(number, slope))  # type: ignore[no-untyped-call]
            self._waiting.append(WaitingLoss(loss, self.plan, self.packed))

    def weigh(self, pack: Pack, divisors: Sequence[float]) -> None:
        """Have the planned forward that comes divide a token's loss by the divisor of its sample."""
        like = torch.zeros((), dtype=torch.float64, device=pack.tokens_T.device)
        self.weights_1T = of_slots(1.0 / np.array(divisors), pack, like)[None]

    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Hook: a planned forward gives its loss alone, since all else lies in other places than the loop looks for
        it. Raises EvenloadError where it was not computed here."""
        if attention.PACK not in kwargs:
            return None
        self.refuse_unused()
        if isinstance(output, tuple):
            return (output[0], *(OfPack() for _ in output[1:]))
        for key in [key for key in output if key != "loss"]:
            output[key] = OfPack()
        return output

    def refuse_unused(self) -> None:
        """Raise EvenloadError where a planned forward did not compute its loss here."""
        if self.weights_1T is not None:
            self.weights_1T = None
            raise EvenloadError(
                "the model's forward does not compute its loss by its loss function",
                "a loss on packs that model.loss_function has no part in",
                "leave evenload off for this script",
            )

    @contextmanager
    def in_place(self, model: Any) -> Iterator[None]:
        """Inside, the model's loss function is this one."""
        model.loss_function = self
        try:
            yield
        finally:
            model.loss_function, self.weights_1T = self.stock, None

    @contextmanager
    def within(self, model: Any) -> Iterator[None]:
        """`in_place`; raises EvenloadError where a planned forward has not used it."""
        with self.in_place(model):
            yield
            self.refuse_unused()

    def run_backward(self, loss: Tensor, run: Callable[[], Any]) -> tuple[Any, list[WaitingLoss]]:
        """Run the backward of a loss; what it gives, and the planned losses that are in its loss. Collective where some
        wait. Raises EvenloadError, the same on all ranks, unless the loss is a sum of their multiples by numbers that
        are the same on all ranks."""
        if not self._waiting or not loss.requires_grad:
            return run(), []
        self._slopes = {}
        handle = loss.register_hook(lambda slope: self._note("loss", slope))  # type: ignore[no-untyped-call]
        try:
            return run(), self._taken(loss)
        finally:
            handle.remove()
            self._slopes = None

    def _taken(self, loss: Tensor) -> list[WaitingLoss]:
        # Measured in the backward itself: engines of DeepSpeed take any other one for theirs.
        waiting, slopes = list(self._waiting), self._slopes or {}
        there = [one for one in waiting if id(one.loss) in slopes]
        values = [loss.sum(), slopes.get("loss", loss.new_ones(()))]
        values += [slopes[id(one.loss)] for one in there] + [one.loss for one in there]
        # All at once: the host waits for the device.
        read: list[float] = torch.stack([value.detach().double() for value in values]).tolist()
        (value, own_slope), read = read[:2], read[2:]
        by_loss = {id(one.loss): slope / own_slope for one, slope in zip(there, read, strict=False)}
        factors = [by_loss.get(id(one.loss)) for one in waiting]
        used = [(one, by_loss[id(one.loss)]) for one in there]
        own = sum(factor * of_one for (_, factor), of_one in zip(used, read[len(there) :], strict=True))
        rounding = 64 * torch.finfo(loss.dtype).eps * abs(own)
        of_ranks = everyone((factors, value, own, bool(used) and abs(value - own) > rounding))
        others = [(value, own) for _, value, own, differs in of_ranks if differs]
        unlike = [factors for factors, *_ in of_ranks if not _alike(factors, of_ranks[0][0])]
        refuse_first(
            (
                bool(others),
                "the loss that reaches accelerator.backward is not the model's own, nor a multiple of it",
                "{:.6g}, where the multiple of the model's is {:.6g}".format(*[*others, (0, 0)][0]),
                "hand model(**batch).loss on, as it is or times a constant, or leave evenload off",
            ),
            (
                bool(unlike),
                "the ranks multiply the model's loss by different numbers before accelerator.backward",
                f"{of_ranks[0][0]} and {unlike[:1]}",
                "multiply by a constant, and give the model num_items_in_batch to divide by a number of tokens",
            ),
        )
        last = max((place for place, factor in enumerate(factors) if factor is not None), default=-1)
        for _ in range(last + 1):
            self._waiting.popleft()
        return [one for one, _ in used]

    def _note(self, key: str | int, slope: Tensor) -> None:
        if self._slopes is None:
            error = EvenloadError(
                "the loss of a batch came to a second backward, or to another than the Accelerator's",
                "a loss of the model's own",
                "write accelerator.backward(loss) for loss.backward(), or leave evenload off",
            )
            if self.strayed is None:
                raise error
            self.strayed(error)
            return
        self._slopes[key] = slope.detach()


def _alike(factors: list[float | None], others: list[float | None]) -> bool:
    """Whether numbers of two ranks differ by rounding alone."""
    pairs = zip(factors, others, strict=True)
    return all(a == b or (a is not None and b is not None and abs(a - b) <= 1e-6 * abs(b)) for a, b in pairs)
