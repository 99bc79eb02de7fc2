"""A user's ``forward_step_func`` on batches of planned rows: what the schedule divides its losses by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .....core.errors import EvenloadError
from ..reading.samples import one_batch


class RowStep:
    """A user's ``forward_step_func`` on batches of planned rows, one after the other.

    Args:
        batches: what it is given; those that are not ``real`` have a loss of zero.
        own: micro-batches of the loop, by whose number it means its losses to be divided.
        per_token: the schedule divides by tokens instead.
    """

    def __init__(
        self, function: Callable[..., Any], batches: Sequence[Any], real: Sequence[bool], *, own: int, per_token: bool
    ) -> None:
        self._function, self._coming = function, iter(zip(batches, real, strict=True))
        self._scale, self._per_token = 1.0 if per_token else len(batches) / own, per_token
        self.losses: list[Tensor] = []
        """Of the micro-batches so far, as the loss function returned them."""

    def __call__(self, _: Any, chunk: Any, *more: Any) -> tuple[Any, Callable[..., Any] | None]:
        batch, real = next(self._coming)
        output, loss_func = self._function(one_batch(batch), chunk, *more)

        def weighed(output: Any, *args: Any, **kwargs: Any) -> Any:
            assert loss_func is not None
            answer = loss_func(output, *args, **kwargs)
            if not isinstance(answer, tuple) or len(answer) != (3 if self._per_token else 2):
                raise EvenloadError(
                    "the loss function returns what Megatron divides by the tokens of a micro-batch, or not at all",
                    f"{len(answer) if isinstance(answer, tuple) else type(answer).__name__} values, "
                    f"calculate_per_token_loss {self._per_token}",
                    "return (loss, report), or (sum, number of tokens, report) with calculate_per_token_loss=True",
                )
            loss, *count, report = answer
            self.losses.append(loss.detach())
            return (loss * (float(real) * self._scale), *(number * int(real) for number in count), report)

        return output, None if loss_func is None else weighed
