"""torch's caching allocator on CUDA, simulated: which segments it takes of the device for a row of blocks.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13), for one stream and without options but one:

    sizes       whole 512 bytes; up to 1 MiB from the small pool, else from the large one
    segments    2 MiB in the small pool; 20 MiB for what is below 10 MiB; else the size in whole 2 MiB
    a block     the smallest free one of the pool that is large enough; what is left of it is a free block where it has
                512 bytes (small pool) or more than 1 MiB (large pool)
    freed       joined with free neighbours of its segment; kept
    no memory   every segment that is wholly free goes back, then it is asked for again
    expandable  (expandable_segments:True) a pool is one segment that grows by pages, of 2 MiB in the small pool and
                20 MiB in the large one; what is left of a block is one from 512 bytes on; where there is no memory, all
                whole pages that are free go back

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
    """A piece of a segment. ``mapped``: has memory behind it; all have, but the ends of expandable segments."""

    address: int
    size: int
    small: bool
    free: bool = False
    mapped: bool = True
    before: Block | None = None
    behind: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


def _free_before(gap: Block) -> int:
    return gap.before.size if gap.before is not None and gap.before.free else 0


def _may_become(block: Block) -> int:
    behind = block.behind
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


class Allocator:
    """Counts ``reserved`` bytes of segments, ``taken`` bytes of blocks (in whole 512), calls of the driver and the
    times that it ran out of memory and gave segments back."""

    def __init__(self, expandable: bool = False, capacity: float = float("inf")) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.reserved = self.taken = self.peak_reserved = self.peak_taken = 0
        self.driver_calls = self.flushes = 0
        self._free: dict[bool, list[tuple[tuple[int, int], Block]]] = {True: [], False: []}
        self._next_address = 0
        self._ends: dict[bool, Block] = {}

    def malloc(self, num_bytes: int) -> Block:
        """A block of at least so many bytes. Raises NoMemoryError."""
        size = max(UNIT, -(-num_bytes // UNIT) * UNIT)
        small = size <= SMALL
        block = self._best(size, small) or self._more(size, small)
        if block is None:
            self._give_back()
            block = self._more(size, small)
        if block is None:
            raise NoMemoryError(f"{num_bytes} bytes, {self.taken} taken and {self.reserved} reserved")
        self._cut(block, size)
        self.taken += block.size
        self.peak_taken = max(self.peak_taken, self.taken)
        return block

    def free(self, block: Block) -> None:
        self.taken -= block.size
        self._add(self._joined(block))

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
        # A block before memory that can still be mapped counts with it, so that it is taken last.
        while self.expandable and place + 1 < len(free):
            if _may_become(free[place + 1][1]) >= _may_become(free[place][1]):
                break
            place += 1
        block = free[place][1]
        self._remove(block)
        return block

    def _more(self, size: int, small: bool) -> Block | None:
        return self._grown(size, small) if self.expandable else self._segment(size, small)

    def _segment(self, size: int, small: bool) -> Block | None:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < BELOW else -(-size // ROUND) * ROUND
        if self.reserved + whole > self.capacity:
            return None
        self._reserve(whole)
        self._next_address += whole
        return Block(self._next_address - whole, whole, small)

    def _reserve(self, num_bytes: int) -> None:
        self.driver_calls += 1
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _grown(self, size: int, small: bool) -> Block | None:
        """The end of the pool's segment, or a gap in it that was given back, with enough memory behind it."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        if small not in self._ends:
            self._ends[small] = Block(int(small) << 50, 1 << 49, small, mapped=False)
        gap = self._first_gap(size, small)
        needed = -(-(size - _free_before(gap)) // page) * page
        if self.reserved + needed > self.capacity:
            return None
        self._reserve(needed)
        block = Block(gap.address, needed, small, before=gap.before, behind=gap)
        if gap.before:
            gap.before.behind = block
        gap.before, gap.address, gap.size = block, gap.address + needed, gap.size - needed
        if not gap.size:
            self._unlink(gap)
        return self._joined(block)

    def _first_gap(self, size: int, small: bool) -> Block:
        gap: Block | None = self._ends[small]
        best = gap
        while gap is not None:
            if not gap.mapped and gap.size + _free_before(gap) >= size:
                best = gap
            gap = gap.before
        assert best is not None
        return best

    def _cut(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < UNIT if block.small or self.expandable else left <= SMALL:
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

    def _joined(self, block: Block) -> Block:
        """The block with its free neighbours, which are no longer in the pool's list."""
        for other in (block.before, block.behind):
            if other is not None and other.mapped and other.free:
                self._remove(other)
                block.address, block.size = min(block.address, other.address), block.size + other.size
                self._unlink(other)
        return block

    def _give_back(self) -> None:
        self.flushes += 1
        for small, entries in self._free.items():
            for _, block in list(entries):
                if not self.expandable:
                    if block.before is None and block.behind is None:
                        self._remove(block)
                        self.reserved -= block.size
                else:
                    self._unmap(block, SMALL_SEGMENT if small else LARGE_SEGMENT)

    def _unmap(self, block: Block, page: int) -> None:
        first, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if end <= first:
            return
        self._remove(block)
        self.reserved -= end - first
        pieces = [Block(first, end - first, block.small, mapped=False)]
        if first > block.address:
            pieces.insert(0, Block(block.address, first - block.address, block.small, free=True))
        if end < block.address + block.size:
            pieces.append(Block(end, block.address + block.size - end, block.small, free=True))
        before, behind = block.before, block.behind
        for left, right in zip([before, *pieces], [*pieces, behind], strict=True):
            if left:
                left.behind = right
            if right:
                right.before = left
        for piece in pieces:
            if piece.free:
                self._add(piece)
