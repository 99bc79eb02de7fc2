"""ByteScale's formulas against their definitions and against numbers worked out by hand."""

import pytest
from evenload.core.costs.offload import layers_on_device, offload_share
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(1e-4, 10.0)
BYTES = st.floats(1e3, 1e12)
SPEED = st.floats(1e8, 1e12)


@given(SECONDS, BYTES, SPEED)
def test_the_largest_share_hides_and_no_larger_one_does(seconds, num_bytes, bytes_per_s):
    share = offload_share(seconds, num_bytes, bytes_per_s)
    assert 0 <= share <= 1
    assert share * num_bytes / bytes_per_s <= seconds * (1 + 1e-12)
    assert share == 1 or (share + 1e-6) * num_bytes / bytes_per_s > seconds


def test_a_longer_sequence_hides_more():
    """T(s) = 2e-12 s^2 + 3e-7 s seconds and Act(s) = 34 * 4096 s bytes, over a link of 25 GB/s."""
    shares = [offload_share(2e-12 * s**2 + 3e-7 * s, 34 * 4096 * s, 25e9) for s in (4096, 65536, 1 << 20, 1 << 22)]
    assert shares == pytest.approx([0.0553, 0.0774, 0.4303, 1.0], abs=1e-3)


def test_nothing_saved_or_no_link_is_no_offload():
    assert offload_share(1.0, 0.0, 1e9) == 0
    assert offload_share(1.0, 1e9, 0.0) == 0


def test_two_layers_stay():
    assert [layers_on_device(32, share) for share in (0.0, 0.5, 1.0)] == [32, 17, 2]
    assert [layers_on_device(layers, 1.0) for layers in (1, 2, 3)] == [1, 2, 2]
