"""Which storages lie on the device. A weak reference keeps the address of a storage from being used again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
_storage = torch.Tensor.untyped_storage
_on_device: dict[int, StorageWeakRef] = {}
_pinned: dict[int, StorageWeakRef] = {}
_lock = threading.Lock()
forgets: list[Callable[[int], Any]] = []
"""What is to be told of storages that are gone, by their address: it will be another's."""


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
    return _tag(tensor, _on_device)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    return _tag(tensor, _pinned)


def is_gone(address: int) -> bool:
    """Whether nobody holds the device's storage of this address any more."""
    return address not in _on_device or _on_device[address].expired()


def put_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
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
