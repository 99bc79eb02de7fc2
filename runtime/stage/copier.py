"""Copies between a device and host memory, alongside the computation, and the host memory that they go to.

Host memory is page-locked in slabs and dealt in blocks of one size; what is stored there takes as many as it needs.
So steps whose lengths differ reuse the same memory, nothing is rounded up to a power of two (torch's own cache of
page-locked memory does that), and at most one block of each stored thing is partly empty.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("evenload")

BLOCK_BYTES = 4 << 20
"""80 us on a link of 50 GB/s, some ten times what it takes to ask for a copy."""
SLAB_BYTES = 64 << 20


class Copier:
    """Copies between a device and the host: at once and in ordinary memory, as on a CPU.

    Copies of one direction run in the order in which they are asked for; a moment is the end of one. Tensors are flat,
    of bytes; the blocks together are at least as long as the tensor on the device.
    """

    def host_memory(self, num_bytes: int) -> Tensor:
        """New memory to copy to."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def out(self, source: Tensor, blocks: Sequence[Tensor], after: Sequence[Any]) -> Any:
        """Copy to the host what has been computed so far, once the moments ``after`` have passed; gives the moment.

        ``source`` must be left alone until somebody has waited for the moment.
        """
        for block, piece in pieces(blocks, source):
            block.copy_(piece)

    def back(self, blocks: Sequence[Tensor], target: Tensor, after: Sequence[Any]) -> Any:
        """Copy to the device, once what has been asked of it so far is done and the moments ``after`` have passed."""
        for block, piece in pieces(blocks, target):
            piece.copy_(block)

    def wait(self, moment: Any) -> None:
        """What is computed from here on, and memory that is reused from here on, comes after the moment."""

    def done(self, moment: Any) -> bool:
        """Whether the moment has passed already."""
        return True


class StreamCopier(Copier):
    """On CUDA: one stream for each direction, page-locked host memory, events as moments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, source: Tensor, blocks: Sequence[Tensor], after: Sequence[Any]) -> Any:
        return self._copy(self._out, pieces(blocks, source), after)

    def back(self, blocks: Sequence[Tensor], target: Tensor, after: Sequence[Any]) -> Any:
        return self._copy(self._back, ((piece, block) for block, piece in pieces(blocks, target)), after)

    def wait(self, moment: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(moment)

    def done(self, moment: Any) -> bool:
        return bool(moment.query())

    def _copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        # Also on the way back: the memory of the target may still be read by what was asked for earlier.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for moment in after:
            stream.wait_event(moment)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        moment = torch.cuda.Event()  # type: ignore[no-untyped-call]
        moment.record(stream)
        return moment


class HostMemory:
    """The host memory of one copier, kept from step to step.

    Args:
        block_bytes: of which everything that is stored takes a whole number.
        slab_bytes: by which the memory grows; blocks are cut from it.
    """

    def __init__(self, copier: Copier, block_bytes: int = BLOCK_BYTES, slab_bytes: int = SLAB_BYTES) -> None:
        self.copier = copier
        self._block_bytes, self._slab_bytes = block_bytes, max(slab_bytes, block_bytes)
        self._free: deque[tuple[Tensor, Any]] = deque()  # those that were given back first are the likeliest to be done
        self._full = False
        self.num_bytes = 0
        """Of all slabs."""

    @property
    def least_bytes(self) -> int:
        """Less is not worth a block, nor the asking."""
        return self._block_bytes // 4

    def take(self, num_bytes: int) -> tuple[list[Tensor], list[Any]] | None:
        """(Blocks, moments after which they may be written to); None where the host has no more memory to lock."""
        count = -(-num_bytes // self._block_bytes)
        while len(self._free) < count:
            if self._full or not self._grow():
                return None
        taken = [self._free.popleft() for _ in range(count)]
        waits = {id(moment): moment for _, moment in taken if moment is not None and not self.copier.done(moment)}
        return [block for block, _ in taken], list(waits.values())

    def give(self, blocks: Iterable[Tensor], moment: Any) -> None:
        """Take blocks back that are read or written until the moment; None: nobody does."""
        self._free.extend((block, moment) for block in blocks)

    def _grow(self) -> bool:
        try:
            slab = self.copier.host_memory(self._slab_bytes)
        except RuntimeError as error:
            self._full = True
            log.warning(
                "no more page-locked host memory after %d MiB, so further activations stay on the device: %s",
                self.num_bytes >> 20,
                error,
            )
            return False
        self.num_bytes += self._slab_bytes
        whole = slab[: self._slab_bytes // self._block_bytes * self._block_bytes]
        self._free.extend((block, None) for block in torch.split(whole, self._block_bytes))
        return True


def pieces(blocks: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(Part of a block, the part of a flat tensor that belongs there), in order."""
    first = 0
    for block in blocks:
        piece = flat[first : first + len(block)]
        yield block[: len(piece)], piece
        first += len(piece)
