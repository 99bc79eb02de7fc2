"""Samples that data ranks share in a user's own Megatron loop: gradients and reports of the loop with nothing on."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SHARED, CHAINS = {"max_tokens": 24}, {"max_tokens": 12}
SEEDS = [{"seed": seed} for seed in range(4)]
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


@pytest.mark.parametrize(
    ("size", "cases", "layout"),
    [
        pytest.param(2, [SHARED, CHAINS, *SEEDS], {"overlap": True}, id="dp2"),
        pytest.param(2, [SHARED, CHAINS], {"fed": True, "calculate_per_token_loss": False}, id="dp2, means"),
        pytest.param(2, [SHARED, *SEEDS[:1]], {"ep": 2, **EXPERTS}, id="dp2ep2"),
        pytest.param(4, [SHARED, *SEEDS], {}, id="dp4"),
        pytest.param(4, [SHARED, CHAINS], {"pp": 2, "overlap": True}, id="dp2pp2"),
        pytest.param(4, [SHARED, CHAINS], {"tp": 2, "sequence_parallel": True, "heads": 2}, id="dp2tp2 in shares"),
    ],
)
def test_shared_samples_give_the_gradients_of_the_stock_loop(on_ranks, size, cases, layout):
    for rank in on_ranks(size, "shared_steps", cases=cases, **layout):
        for found in rank: print(found)
        for result in rank:
            assert "error" not in result, result
            assert result["grad"] < 1e-9, result
            assert result["loss"] < 1e-12
            assert result["reports"] < 1e-12
            assert result["comms"], "a plan shares no sample"
        assert any(result["cut"] for result in rank) or CHAINS not in cases
