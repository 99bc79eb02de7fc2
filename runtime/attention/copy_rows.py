"""Rows between host and device: one copy by way of page-locked memory, which no thread waits for on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes at whose multiples each row begins; a multiple of every item's."""


def copy_rows(rows: Mapping[str, npt.NDArray[Any]], device: torch.device | str) -> dict[str, Tensor]:
    """Each array as a tensor of its dtype on the device, by its name.

    On CUDA they are contiguous in one buffer. The copy runs on the current stream; torch's cache of page-locked
    memory does not give the source away before it is done. A copy from other memory would make the host wait for all
    that the stream still has to do.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {name: torch.from_numpy(row).to(device) for name, row in rows.items()}
    borders = np.cumsum([0, *(-(-row.nbytes // _ALIGNED) * _ALIGNED for row in rows.values())]).tolist()
    staging = torch.empty(borders[-1], dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for row, first in zip(rows.values(), borders, strict=False):
        host[first : first + row.nbytes] = row.reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return {
        name: there[first : first + row.nbytes].view(torch.from_numpy(row).dtype).view(row.shape)
        for (name, row), first in zip(rows.items(), borders, strict=False)
    }


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, to which it goes as rows do where it lies on the host."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """A copy of a tensor on its way to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().to(
            "cpu", non_blocking=True, copy=True
        )  # page-locked where it comes from a device
        self._copied = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> Tensor:
        """The tensor on the host. Waits for the device if it has not come so far."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor
