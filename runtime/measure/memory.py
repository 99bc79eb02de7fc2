"""Bytes of a device: how many are taken and free now, and the most that some work takes at once.

That counts every tensor the work makes, what autograd saves and what backward allocates.

On CUDA the allocator keeps the books. On the CPU nobody does, so every operator that runs inside the block is watched:
a storage counts from the operator that made it until the last tensor, view or autograd node lets go of it. Not seen are
memory that torch did not allocate (numpy arrays) and what one kernel takes and gives back while it runs.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors alive on the device: by the allocator's books on CUDA, by a walk over objects on the CPU.

    On the CPU, storages that no tensor known to Python refers to are missed.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # By type: isinstance would ask lazy modules and proxies for their __class__.
        if issubclass(type(candidate), Tensor):
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                if tensor is not None and tensor.device == device and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Levels:
    """Memory on the device between chosen points of the work inside, in bytes above the level at the beginning.

    with Levels(device) as levels:
        ...
        before, highest = levels.read()

    Tensors that were there before count as there throughout on the CPU, even if they are freed inside. The CPU path
    sees the operators of this thread and of the backward passes that it starts, and slows each by some microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tracker = None if device.type == "cuda" else StorageTracker(device)
        self._base = 0

    def __enter__(self) -> Levels:
        if self._tracker is not None:
            self._tracker.__enter__()  # type: ignore[no-untyped-call]
        else:
            torch.cuda.synchronize(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(*error)  # type: ignore[no-untyped-call]

    def read(self) -> tuple[int, int]:
        """(level now, highest level since the last reading). Waits for nothing: allocators follow the host's order."""
        if self._tracker is not None:
            return self._tracker.level, self._tracker.restart()
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device) - self._base, peak - self._base


@dataclass
class _Booked:
    """A storage that is known; ``num_bytes`` follows one that is resized."""

    reference: weakref.ref[Any]
    counts: bool
    """Made inside the block."""
    num_bytes: int = 0


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make while it is entered; `Levels` is how to use it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        # A storage keeps its Python object while anything in C++ holds it, so the weak reference dies with the memory.
        self._known: dict[int, _Booked] = {}
        self.level = 0
        """Bytes counted now."""
        self.peak = 0
        """The highest level so far."""

    def restart(self) -> int:
        """The highest level so far; from here on that of what follows counts."""
        peak, self.peak = self.peak, self.level
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and book what it made. Inputs not seen before were there before the block."""
        for tensor in _tensors((args, kwargs or {})):
            self._note(tensor, counts=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._note(tensor, counts=True)
        self.peak = max(self.peak, self.level)
        return out

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        if tensor.device != self._device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._known:
            self._known[key] = _Booked(weakref.ref(storage, lambda _: self._forget(key)), counts)
        booked = self._known[key]
        if booked.counts and booked.num_bytes != storage.nbytes():
            self.level += storage.nbytes() - booked.num_bytes
            booked.num_bytes = storage.nbytes()

    def _forget(self, key: int) -> None:
        self.level -= self._known.pop(key).num_bytes


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _tensors(part)
