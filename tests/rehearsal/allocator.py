"""torch's caching allocator on CUDA, simulated: which segments it takes of the device for a row of blocks.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13), for one stream and without options:

    sizes       whole 512 bytes; up to 1 MiB from the small pool, else from the large one
    segments    2 MiB in the small pool; 20 MiB for what is below 10 MiB; else the size in whole 2 MiB
    a block     the smallest free one of the pool that is large enough; what is left of it is a free block where it has
                512 bytes (small pool) or more than 1 MiB (large pool)
    freed       joined with free neighbours of its segment; kept
    no memory   every segment that is wholly free goes back, then it is asked for again

"No memory" is where the segments together would be more than the capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20
UNIT, SMALL, SMALL_SEGMENT, BELOW, LARGE_SEGMENT, ROUND = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


class NoMemoryError(RuntimeError):
    """The device is full of blocks that are in use."""


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    behind: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class Allocator:
    """Counts ``reserved`` bytes of segments, ``taken`` bytes of blocks (in whole 512), and the times that it ran out of
    memory and gave segments back."""

    def __init__(self, capacity: float = float("inf")) -> None:
        self.capacity = capacity
        self.reserved = self.taken = self.peak_reserved = self.peak_taken = self.flushes = 0
        self._free: dict[bool, list[tuple[tuple[int, int], Block]]] = {True: [], False: []}
        self._next_address = 0

    def malloc(self, num_bytes: int) -> Block:
        """A block of at least so many bytes. Raises NoMemoryError."""
        size = max(UNIT, -(-num_bytes // UNIT) * UNIT)
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        if block is None:
            self._give_back()
            block = self._segment(size, small)
        if block is None:
            raise NoMemoryError(f"{num_bytes} bytes, {self.taken} taken and {self.reserved} reserved")
        self._cut(block, size)
        self.taken += block.size
        self.peak_taken = max(self.peak_taken, self.taken)
        return block

    def free(self, block: Block) -> None:
        self.taken -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._remove(other)
                block.address, block.size = min(block.address, other.address), block.size + other.size
                self._unlink(other)
        self._add(block)

    def restart(self) -> None:
        """Peaks are those of what follows."""
        self.peak_taken, self.peak_reserved = self.taken, self.reserved

    def _add(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.key, block), key=lambda entry: entry[0])

    def _remove(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, block.key, key=lambda entry: entry[0])]
        block.free = False

    def _best(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        place = bisect_left(free, (size, -1), key=lambda entry: entry[0])
        if place == len(free):
            return None
        block = free[place][1]
        self._remove(block)
        return block

    def _segment(self, size: int, small: bool) -> Block | None:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < BELOW else -(-size // ROUND) * ROUND
        if self.reserved + whole > self.capacity:
            return None
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += whole
        return Block(self._next_address - whole, whole, small)

    def _cut(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < UNIT if block.small else left <= SMALL:
            return
        rest = Block(block.address + size, left, block.small, before=block, behind=block.behind)
        if block.behind:
            block.behind.before = rest
        block.behind, block.size = rest, size
        self._add(rest)

    def _unlink(self, block: Block) -> None:
        if block.before:
            block.before.behind = block.behind
        if block.behind:
            block.behind.before = block.before

    def _give_back(self) -> None:
        self.flushes += 1
        for entries in self._free.values():
            for _, block in list(entries):
                if block.before is None and block.behind is None:
                    self._remove(block)
                    self.reserved -= block.size
