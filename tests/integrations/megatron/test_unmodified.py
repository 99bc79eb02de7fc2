"""Orders of plans in a user's own Megatron loop: the gradients of the same loop with nothing switched on."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SEEDS = [1, 2, 3, 4, 5, 6]
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {"pp": 2}, id="pp2"),
    pytest.param(2, {"overlap": True}, id="dp2"),
    pytest.param(4, {"pp": 2, "overlap": True}, id="dp2pp2"),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_random_plans_give_the_gradients_of_the_stock_loop(on_ranks, size, layout):
    results = on_ranks(size, "user_plans", seeds=SEEDS, **layout)
    for rank in results:
        for found in rank:
            assert found["grad"] < 1e-9, found
            assert found["loss"] < 1e-7, found  # tokens' losses are float32
        assert any(found.get("cut") for found in rank)
        assert any(found.get("recomputed") for found in rank)
        assert all(found["reports"] == found["losses"] for found in rank[:-1])
