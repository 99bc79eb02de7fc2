"""Busy seconds of the experts of a trainer's layers, apart from all else that a step computes.

Trainers name the module of a layer's experts ``experts``. It is entered with the tokens that are routed to this rank's
own ones and left with theirs, so what is timed is their products alone: routers, the copies of tokens and the exchange
lie outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


class ExpertSeconds:
    """Sums of one step, forward and backward, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.forward_s = self.backward_s = 0.0
        self._clock = clock

    def entering(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook before an expert module's forward: its inputs, watched until their gradients are there."""
        watched = list(inputs)
        at = next((k for k, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad), None)
        if at is not None:
            # A tensor of its own has its gradient as soon as the experts have run backward, whoever else reads it.
            watched[at] = inputs[at].view_as(inputs[at])
            watched[at].register_hook(self._end_of_backward)
        self.forward_s -= self._clock()
        return tuple(watched)

    def leaving(self, _: nn.Module, __: Any, outputs: Any) -> None:
        """A hook after its forward."""
        self.forward_s += self._clock()
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if output.requires_grad:
            output.register_hook(self._begin_of_backward)

    def _begin_of_backward(self, _: Tensor) -> None:
        self.backward_s -= self._clock()

    def _end_of_backward(self, _: Tensor) -> None:
        self.backward_s += self._clock()


@contextmanager
def timing_experts(host: Any, clock: Callable[[], float]) -> Iterator[ExpertSeconds]:
    """Time the experts of a host's model; none where it has none."""
    model = host.engine.module if hasattr(host, "engine") else host.model
    seconds = ExpertSeconds(clock)
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "experts":
                undo.callback(module.register_forward_pre_hook(seconds.entering).remove)
                undo.callback(module.register_forward_hook(seconds.leaving).remove)
        yield seconds
