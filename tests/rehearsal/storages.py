"""Which storages lie on the device, and the blocks of its allocator that they are. A weak reference keeps the address
of a storage from being used again.

The allocator is torch's own, simulated (`allocator.py`): a block is taken when a storage is put on the
device, of its size at that time, and freed when the last tensor lets go of it. One stream; a kernel's own workspace is
not seen.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .allocator import Allocator

CPU = torch.device("cpu")
_storage = torch.Tensor.untyped_storage
_on_device: dict[int, StorageWeakRef] = {}
_pinned: dict[int, StorageWeakRef] = {}
_lock = threading.Lock()
forgets: list[Callable[[int], Any]] = []
"""What is to be told of storages that are gone, by their address: it will be another's."""


_allocator = Allocator()
_held: dict[int, tuple[weakref.ref[Any], Any]] = {}
_let_go: deque[int] = deque()
"""Storages that are gone, whose blocks are freed before the next one is taken: the collector may call in its midst."""


def memory() -> Any:
    """The allocator of the device, as it is now."""
    with _lock:
        while _let_go:
            if (held := _held.pop(_let_go.popleft(), None)) is not None:
                _allocator.free(held[1])
    return _allocator


def _take(storage: torch.UntypedStorage) -> None:
    number, allocator = id(storage), memory()
    if storage.nbytes():
        with _lock:
            _held[number] = weakref.ref(storage, lambda _: _let_go.append(number)), allocator.malloc(storage.nbytes())


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def key(tensor: torch.Tensor) -> int | None:
    """The address of its storage; None where it has none (a meta tensor has one of its own)."""
    try:
        return int(_storage(tensor)._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def on_device(tensor: torch.Tensor) -> bool:
    return key(tensor) in _on_device


def is_pinned(tensor: torch.Tensor) -> bool:
    return key(tensor) in _pinned


def storage_on_device(storage: torch.UntypedStorage) -> bool:
    return storage._cdata in _on_device


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Let the tensor's storage lie on the device from here on."""
    if not on_device(tensor) and not tensor.is_meta and key(tensor) is not None:
        _take(_storage(tensor))
    return _tag(tensor, _on_device)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    return _tag(tensor, _pinned)


def is_gone(address: int) -> bool:
    """Whether nobody holds the device's storage of this address any more."""
    return address not in _on_device or _on_device[address].expired()


def put_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if not storage_on_device(storage):
        _take(storage)
    with _lock:
        _on_device.setdefault(storage._cdata, StorageWeakRef(storage))
    return storage


def _tag(tensor: torch.Tensor, tags: dict[int, StorageWeakRef]) -> torch.Tensor:
    address = key(tensor)
    if address is not None and address not in tags:
        with _lock:
            tags[address] = StorageWeakRef(_storage(tensor))
            if len(tags) % 4096 == 0:
                for gone in [a for a, reference in tags.items() if reference.expired()]:
                    del tags[gone]
                    for forget in forgets:
                        forget(gone)
    return tensor
