"""Samples that data ranks share in a user's own Megatron loop: the gradients of the same loop with nothing on."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"overlap": True}, id="dp2"),
        pytest.param(4, {}, id="dp4"),
        pytest.param(4, {"pp": 2, "overlap": True}, id="dp2pp2"),
        pytest.param(4, {"tp": 2, "sequence_parallel": True, "heads": 2}, id="dp2tp2 in shares"),
    ],
)
def test_shared(on_ranks, size, layout):
    for rank in on_ranks(size, "shared_steps", seeds=[None, 1, 2, 3, 4], mesh={"max_tokens": 40}, **layout):
        for found in rank:
            print(found)
        for found in rank:
            assert found["grad"] < 1e-9, found
