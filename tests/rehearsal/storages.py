"""Which storages lie on the device, and their bytes. A weak reference keeps the address of a storage from being used
again."""

from __future__ import annotations

import os
import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
_storage = torch.Tensor.untyped_storage
_on_device: dict[int, StorageWeakRef] = {}
_pinned: dict[int, StorageWeakRef] = {}
_lock = threading.Lock()


class Books:
    """Bytes on the device, without what an allocator rounds; a storage counts with the size that it has at first."""

    allocated = peak = 0
    _references: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # noqa: RUF012

    @classmethod
    def enter(cls, storage: torch.UntypedStorage) -> None:
        address, num_bytes = id(storage), storage.nbytes()

        def leave(_: object) -> None:
            cls.allocated -= num_bytes
            cls._references.pop(address, None)

        cls._references[address] = weakref.ref(storage, leave)
        cls.allocated += num_bytes
        cls.peak = max(cls.peak, cls.allocated)

    @classmethod
    def restart(cls) -> None:
        cls.peak = cls.allocated


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


def put_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    with _lock:
        new = storage._cdata not in _on_device
        _on_device.setdefault(storage._cdata, StorageWeakRef(storage))
    if new:
        Books.enter(storage)
    return storage


def _tag(tensor: torch.Tensor, tags: dict[int, StorageWeakRef]) -> torch.Tensor:
    address = key(tensor)
    if address is not None and address not in tags:
        storage = _storage(tensor)
        if tags is _on_device and storage.device.type != "meta":
            Books.enter(storage)
        with _lock:
            tags[address] = StorageWeakRef(storage)
            if len(tags) % 4096 == 0:
                for gone in [a for a, reference in tags.items() if reference.expired()]:
                    del tags[gone]
    return tensor
