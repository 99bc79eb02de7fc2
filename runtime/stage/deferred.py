"""Weight gradients of linear layers, computed later than the rest of their backward.

The backward of y = x W^T is two products: dx = dy W, which the layer before and the pipeline stage before wait for, and
dW = dy^T x, which nobody waits for (zero-bubble pipelines, Qi et al., arXiv 2401.10241, section 2).

    with deferring(linears, later):        # nn.Linear; other modules call `WgradStore.linear` themselves
        with later.splitting(7):
            loss = model(...)
        with later.splitting(7):
            loss.backward()                # dx alone; x and dy of every linear layer are booked
        later.run(7)                       # dW

Around the forward `splitting` keeps the weight out of the graph: hooks of trainers at a weight's AccumulateGrad fire
with every backward that reaches it, gradient or not, and then may miss it. Around the backward it does the same for
layers that are recomputed there.

`run` is a backward pass of its own, from one node per weight that gives dW: the hooks fire as usual, and dW is taken
over, not copied as it would be if it were handed in with a root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import EvenloadError
from ..attributes import with_attributes


class _Left(NamedTuple):
    weight: Tensor
    """[outputs, inputs]."""
    x: Tensor
    """[..., inputs]."""
    dy: Tensor
    """[..., outputs]."""


class WgradStore:
    """What backwards have left for later, by their numbers."""

    def __init__(self) -> None:
        self._left: dict[int, list[_Left]] = {}
        self._open: list[_Left] | None = None

    @contextmanager
    def splitting(self, number: int) -> Iterator[None]:
        """Forwards inside leave the weight gradients of their backward to ``run(number)``."""
        assert self._open is None, "one pass at a time"
        self._open = self._left.setdefault(number, [])
        try:
            yield
        finally:
            self._open = None

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a layer that runs now leaves the gradient of its weight.

        Its input needs one to have a backward, and under autocast the product is not of the weight but of a cast of it.
        """
        wanted = self._open is not None and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        return wanted and not torch.is_autocast_enabled(x.device.type)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, sum_over: Any = None) -> Tensor:
        """x W^T + bias: [..., outputs] from [..., inputs]; the gradient of the weight is left. ``sum_over``: process
        group over whose ranks dx is summed, where they hold parts of the outputs (tensor parallelism)."""
        assert self._open is not None
        layer = weight, self._open, sum_over  # not one by one: autograd would put the weight into the graph
        result: Tensor = _Linear.apply(x, bias, layer)  # type: ignore[no-untyped-call]
        return result

    def run(self, number: int) -> None:
        """Add up what backward ``number`` left, last layer first, and free each when it is done. Raises EvenloadError:
        that backward left nothing to do, or it was done before."""
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
        """Bytes of all inputs and output gradients that wait; shared memory counts once."""
        waiting = [t for left in self._left.values() for item in left for t in (item.x, item.dy)]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in waiting)}
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


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """dW = dy^T x over all tokens: [outputs, inputs]."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@contextmanager
def deferring(linears: Iterable[nn.Linear], later: WgradStore) -> Iterator[None]:
    """These layers can leave their weight gradients to ``later``; afterwards they are as they were.

    Raises EvenloadError where someone else has replaced the forward of one.
    """
    with ExitStack() as undo:
        for layer in linears:
            undo.enter_context(replaced(layer, "forward", _forward(layer, later)))
        yield


def replaced(module: nn.Module, method: str, by: Callable[..., Any]) -> AbstractContextManager[None]:
    """One module's own version of a method of its class. Raises EvenloadError where it has one already."""
    if method in vars(module):
        raise EvenloadError(
            f"{method} of a layer has been replaced by someone else",
            f"{type(module).__name__}: {vars(module)[method]!r}",
            "keep its weight gradients in the backward (plugins.pipeline.split_backward=off), or take the other out",
        )
    return with_attributes(module, **{method: by})


def _forward(layer: nn.Linear, later: WgradStore) -> Callable[[Tensor], Tensor]:
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        return later.linear(x, layer.weight, layer.bias) if later.takes(x, layer.weight) else own(x)

    return forward


class _Linear(torch.autograd.Function):
    """A linear layer whose backward leaves dW; its weight is out of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: tuple[Tensor, list[_Left], Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, layer[0], bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, left, sum_over = ctx.layer
        (x,) = ctx.saved_tensors
        dx, work = dy @ weight, None
        if sum_over is not None:
            work = dist.all_reduce(dx, group=sum_over, async_op=True)
        left.append(_Left(weight, x.detach(), dy))  # with its history, x would keep the inputs of all layers before
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        if work is not None:
            work.wait()
        return dx, db, None


class _Weight(torch.autograd.Function):
    """A number that does not matter, made from a weight whose gradient is what a layer has left."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, item: list[_Left]) -> Tensor:
        ctx.item = item
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        left = ctx.item.pop()
        return weight_gradient(left.x, left.dy), None
