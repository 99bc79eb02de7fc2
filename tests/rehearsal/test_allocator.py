"""The simulated allocator: what torch's own takes of the device, by its rules, and books that always balance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import allocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "taken", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513, 1], 1024 + 512, 2 * MIB),
        ([MIB, MIB, MIB], 3 * MIB, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
        ([19 * MIB + 1], 20 * MIB, 20 * MIB),
        ([20 * MIB + 1], 20 * MIB + 512, 22 * MIB),
        ([100 * MIB], 100 * MIB, 100 * MIB),
    ],
)
def test_sizes_and_segments_are_those_of_torch(sizes: list[int], taken: int, reserved: int) -> None:
    """A rest of up to 1 MiB stays with its block in the large pool."""
    device = allocator.Allocator()
    for size in sizes:
        device.malloc(size)
    assert (device.taken, device.reserved) == (taken, reserved)


def test_what_is_free_goes_back_before_memory_runs_out() -> None:
    device = allocator.Allocator(capacity=100 * MIB)
    device.free(device.malloc(60 * MIB))
    device.malloc(90 * MIB)
    assert (device.flushes, device.reserved) == (1, 90 * MIB)
    with pytest.raises(allocator.NoMemoryError):
        device.malloc(20 * MIB)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 64 * MIB)), max_size=60),
    st.sampled_from([float("inf"), 256 * MIB]),
)
def test_no_block_lies_on_another_and_all_that_is_freed_comes_back(
    asked: list[tuple[int, int]], capacity: float
) -> None:
    device = allocator.Allocator(capacity)
    held: dict[int, Any] = {}
    for place, size in asked:
        if place in held:
            device.free(held.pop(place))
        try:
            held[place] = device.malloc(size)
        except allocator.NoMemoryError:
            continue
        assert held[place].size >= size
        spans = sorted((block.address, block.address + block.size) for block in held.values())
        assert all(end <= first for (_, end), (first, _) in pairwise(spans))
        assert device.taken == sum(block.size for block in held.values()) <= device.reserved <= capacity
    for block in held.values():
        device.free(block)
    device._give_back()
    assert device.taken == 0
    assert device.reserved == 0
