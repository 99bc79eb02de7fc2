"""The states of a distributed optimizer with several buckets, saved where they belong.

Megatron-Core 0.16 gathers a buffer's states bucket by bucket without the padding between buckets, and then looks for
each parameter where it lies with padding: all behind the first bucket come out shifted, or as zeros ("a bug in the
param ranges logic", it says of what it finds missing). A tied embedding has a bucket of its own, overlapped reduction
one for every 40 million weights. Here the padding is put back before parameters are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from ....runtime.attributes import with_attributes


@contextmanager
def states_in_their_places(optimizer: Any) -> Iterator[None]:
    """Holds around ``sharded_state_dict`` of a Megatron optimizer, chained or not."""
    with ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if isinstance(part, DistributedOptimizer):
                gathered = _padded(part, part.get_parameter_state_dp_zero)
                stack.enter_context(with_attributes(part, get_parameter_state_dp_zero=gathered))
        yield


def _padded(part: Any, gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(**how: Any) -> Any:
        state = gather(**how)
        for number, buffer in enumerate(part.buffers if state is not None else ()):
            for of_dtype in state[number].values():
                for key, values in of_dtype.items():
                    if isinstance(values, Tensor):
                        of_dtype[key] = _with_padding(values, buffer)
        return state

    return gathered


def _with_padding(values: Tensor, buffer: Any) -> Tensor:
    """Values of a buffer's weights, one bucket after the other, where the buffer has them."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    padded = torch.zeros(buffer.numel, dtype=values.dtype)
    for bucket, part in zip(buffer.buckets, torch.split(values, sizes), strict=True):
        padded[bucket.offset : bucket.offset + len(part)] = part
    return padded
