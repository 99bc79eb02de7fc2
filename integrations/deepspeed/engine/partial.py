"""Parts of a Hugging Face model with the weights that the seed gives them in the whole, without memory for the rest.

Weights are drawn from one generator, layer after layer: what a part gets depends on all that was drawn before it. Here
the whole is built without memory, and what is drawn for its weights fills memory of the moment. The generator moves as
ever; where it stood before a weight, the weights that are wanted are drawn once more. The peak is the parts and the
largest weight, the time the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Parts = Callable[[Any], Iterable[nn.Module]]
"""Picks the modules of a model that are wanted."""


def build_partly(make: Callable[[], Any], parts: Parts) -> Any:
    """The model that `make` gives, its `parts` bit-equal; matrices and tables elsewhere are on the meta device.

    ``make``: builds a `PreTrainedModel` from the CPU's generator. Each of its modules draws its ``weight`` alone, and
    none is tied to another.
    """
    with _Drawing() as drawing:
        model = make()
    for module in (module for part in parts(model) for module in part.modules()):
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            state = drawing.before.get(id(module.weight))
            module.to_empty(device="cpu", recurse=False)
            if state is not None:
                torch.set_rng_state(state)
            with torch.no_grad():
                model._init_weights(module)
    return model


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Empty tensors are on the meta device; what is computed (tables of positions, ones) is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        on_meta = {"device": "meta"} if func is torch.ops.aten.empty.memory_format else {}
        return func(*args, **{**(kwargs or {}), **on_meta})


class _Drawing(WithoutMemory):  # type: ignore[no-untyped-call]
    """Empty tensors get no memory; filling one at random moves the generator as if it had."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, torch.Tensor] = {}
        """State of the generator before a tensor was filled for the last time, by the tensor's id."""
        self._buffer = torch.empty(0)
        """For what is drawn; one for all, since memory given back between states that stay would not fit the next."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and args[0].is_meta:
            like = args[0]
            self.before[id(like)] = torch.get_rng_state()
            if len(self._buffer) < like.numel() or self._buffer.dtype != like.dtype:
                self._buffer = torch.empty(like.numel(), dtype=like.dtype)
            func(self._buffer[: like.numel()].view(like.shape), *args[1:], **kwargs)
            return like
        return super().__torch_dispatch__(func, types, args, kwargs)
