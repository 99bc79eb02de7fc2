"""Weight gradients of linear layers, computed later than the rest of their backward.

The backward of y = x W^T is two products: dx = dy W, which the layer before and the pipeline stage before wait for, and
dW = dy^T x, which nobody waits for (zero-bubble pipelines, Qi et al., arXiv 2401.10241, section 2).

    later = WeightGradients()
    with leaving(linears, later):          # nn.Linear; other modules call `linear` themselves
        loss = model(...)
        with later.of_backward(7):
            loss.backward()                # dx alone; x and dy of every linear layer are booked
        later.run(7)                       # dW

Whether dW is left is decided where the backward runs, not where the forward ran: so layers that are recomputed in the
backward need nothing else, and without `of_backward` both products are computed at once. `run` is a backward pass of
its own, from one node per weight that gives dW: whatever hangs at the weight's AccumulateGrad (Megatron's and
DeepSpeed's hooks) fires as ever, and dW is taken over, not copied as it would be if it were handed in with a root.
Nothing is computed twice. Two layers of Megatron, hidden 256, on one core of a CPU, backward of 1024 tokens: 145 ms as
it is, 108 + 37 ms in two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.errors import EvenloadError


class _Left(NamedTuple):
    """What one layer left in one backward."""

    weight: Tensor
    """[outputs, inputs]."""
    x: Tensor
    """[..., inputs]."""
    dy: Tensor
    """[..., outputs]."""


class WeightGradients:
    """What backwards have left for later, by their numbers."""

    def __init__(self) -> None:
        self._left: dict[int, list[_Left]] = {}
        self._open: list[_Left] | None = None

    @contextmanager
    def of_backward(self, number: int) -> Iterator[None]:
        """The backward inside leaves its weight gradients to ``run(number)``."""
        assert self._open is None, "one backward at a time"
        self._open = self._left.setdefault(number, [])
        try:
            yield
        finally:
            self._open = None

    @property
    def leaves(self) -> bool:
        """Whether a backward that runs now leaves its weight gradients."""
        return self._open is not None

    def book(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        """Leave the gradient of a weight to the backward's `run`."""
        assert self._open is not None
        self._open.append(_Left(weight, x, dy))

    def run(self, number: int) -> None:
        """Add up what backward ``number`` left, last layer first, and free each when it is done.

        Raises:
            EvenloadError: that backward left nothing to do, or it was done before.
        """
        left = self._left.pop(number, None)
        if left is None:
            raise EvenloadError(
                "weight gradients are asked for that no backward has left",
                f"backward {number}; waiting: {sorted(self._left) or 'none'}",
                "run each once, after its backward",
            )
        with torch.enable_grad():  # the last node that is made runs first
            roots = [_Weight.apply(item.weight, [item]) for item in reversed(left)]  # type: ignore[no-untyped-call]
        left.clear()
        if roots:
            torch.autograd.backward(roots)

    def held_bytes(self) -> int:
        """Of all inputs and output gradients that wait; shared memory counts once."""
        storages = {s.data_ptr(): s.nbytes() for s in self._storages()}
        return sum(storages.values())

    def check_empty(self) -> None:
        """Free what is left; raise EvenloadError if there was something."""
        numbers, self._left = sorted(self._left), {}
        if numbers:
            raise EvenloadError(
                "weight gradients are missing at the end of the step",
                f"of {len(numbers)} backwards, the first is {numbers[0]}",
                "run the W of every backward that was split",
            )

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for item in (item for left in self._left.values() for item in left):
            yield item.x.untyped_storage()
            yield item.dy.untyped_storage()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients, sum_over: Any = None) -> Tensor:
    """x W^T + bias: [..., outputs] from [..., inputs]; its backward may leave the gradient of the weight.

    Args:
        sum_over: process group over whose ranks dx is summed, where they hold parts of the outputs (tensor
            parallelism); overlaps with dW where that is not left.
    """
    result: Tensor = _Linear.apply(x, weight, bias, later, sum_over)  # type: ignore[no-untyped-call]
    return result


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """dW = dy^T x over all tokens: [outputs, inputs]."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@contextmanager
def leaving(linears: Iterable[nn.Linear], later: WeightGradients) -> Iterator[None]:
    """These layers can leave their weight gradients to ``later``; afterwards they are as they were."""
    with ExitStack() as undo:
        for layer in linears:
            undo.enter_context(replaced(layer, "forward", partial(_forward, layer, later)))
        yield


@contextmanager
def replaced(module: nn.Module, method: str, by: Any) -> Iterator[None]:
    """One module's own version of a method of its class."""
    if method in vars(module):
        raise EvenloadError(
            f"{method} of a layer has been replaced by someone else",
            f"{type(module).__name__}: {vars(module)[method]!r}",
            "keep its weight gradients in the backward (plugins.pipeline.split_backward=off), or take the other out",
        )
    setattr(module, method, by)
    try:
        yield
    finally:
        delattr(module, method)


def _forward(layer: nn.Linear, later: WeightGradients, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, later)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward asks `WeightGradients` whether to compute dW."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients, sum_over: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.sum_over = later, sum_over
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = db = work = None
        if wants_x:
            dx = dy @ weight
            if ctx.sum_over is not None:
                work = dist.all_reduce(dx, group=ctx.sum_over, async_op=True)
        if wants_weight and ctx.later.leaves:
            ctx.later.book(weight, x, dy)
        elif wants_weight:
            dw = weight_gradient(x, dy)
        if wants_bias:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        if work is not None:
            work.wait()
        return dx, dw, db, None, None


class _Weight(torch.autograd.Function):
    """A number that does not matter, made from a weight whose gradient is what a layer has left."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, item: list[_Left]) -> Tensor:
        ctx.item = item
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        left = ctx.item.pop()
        return weight_gradient(left.x, left.dy), None
