"""How many bytes work holds: everything alive on a device, and what a forward pass keeps for its backward."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors alive on the device: by the allocator's books on CUDA, by a walk over objects on the CPU.

    On the CPU, storages that no tensor known to Python refers to are missed.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type: isinstance would ask lazy modules and proxies for their __class__.
        if issubclass(type(thing), Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device == device and tensor.layout == torch.strided:
                    _note(storages, tensor)
    return sum(storages.values())


@dataclass
class Held:
    """Filled in when the block of `held_for_backward` ends."""

    num_bytes: int = 0


@contextmanager
def held_for_backward(device: torch.device) -> Iterator[Held]:
    """Bytes that passes inside the block need beyond what was there before.

    On CUDA the highest level of the allocator; on the CPU the storages that autograd saved, each counted once (weights
    that are saved among them, buffers of a moment not). Run one forward and backward inside.
    """
    held = Held()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield held
        held.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        _note(storages, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield held
    held.num_bytes = sum(storages.values())


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _note(storages: dict[int, int], tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()
