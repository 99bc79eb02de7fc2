"""Samples that data ranks share in a user's own Megatron loop: gradients and reports of the loop with nothing on."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS, ROUTER_LOSSES

pytestmark = pytest.mark.slow

CHAINS, SHARED = {"max_tokens": 20}, [{"max_tokens": 64, "instead": "cp_all"}, {"cut": 0}]
SEEDS = [{"seed": seed} for seed in range(2)]


@pytest.mark.parametrize(
    ("size", "cases", "layout"),
    [
        pytest.param(2, [CHAINS, *SHARED, *SEEDS[:1]], {"overlap": True}, id="dp2"),
        pytest.param(2, SHARED, {"fed": True, **MEANS}, id="dp2, means"),
        pytest.param(2, SHARED, {"ep": 2, **ROUTER_LOSSES}, id="dp2ep2"),
        only_full(4, [*SHARED, *SEEDS], {}, id="dp4"),
        pytest.param(4, SHARED[:1], {"pp": 2, "overlap": True}, id="dp2pp2"),
        only_full(4, [CHAINS, *SHARED], {"pp": 2, "overlap": True}, id="dp2pp2, all"),
        only_full(4, SHARED, {"tp": 2, "sequence_parallel": True, "heads": 2}, id="dp2tp2 in shares"),
    ],
)
def test_shared_samples_give_the_gradients_of_the_stock_loop(on_ranks, size, cases, layout):
    for rank in on_ranks(size, "shared_steps", cases=cases, **layout):
        for result in rank:
            assert "error" not in result, result
            assert result["grad"] < 1e-9, result
            assert result["loss"] < 1e-12
            assert result["reports"] < 1e-12
        assert [bool(result["comms"]) for result in rank] == [case is not CHAINS for case in cases]
        assert all(result["cut"] for result, case in zip(rank, cases, strict=True) if "cut" in case or case is CHAINS)


def test_the_proof_catches_planted_faults(on_ranks):
    mutants = ["a part without loss", "lost in forward", "lost in backward"]
    for results in on_ranks(2, "shared_steps", cases=[{**SHARED[0], "mutant": mutant} for mutant in mutants]):
        assert all(result["grad"] > 1e-4 for result in results), results
