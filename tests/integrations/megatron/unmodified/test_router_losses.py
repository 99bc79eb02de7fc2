"""Losses of routers in a Megatron loop whose samples are regrouped: each token and sequence keeps the weight that the
stock loop gives it, whoever has its share of a pack, through every dispatcher.

Routers compute in float64 here; passes that recompute layers leave that mode, and are in test_order.py.
"""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests import settings
from megatron_tests.settings import ROUTER_LOSSES, SHARES

pytestmark = pytest.mark.slow

LOSSES = {**ROUTER_LOSSES, "moe_shared_expert_intermediate_size": 16, "exact": True}
# The stock loop divides by the number of micro-batches in float32.
MEANS = {**settings.MEANS, "micro_batches": 4}
SCALED = {"scale": 8.0}
GATHERS = {"moe_token_dispatcher_type": "allgather"}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"ep": 2, **GATHERS}, id="tokens, ep2, allgather"),
        only_full(2, {"ep": 2, **MEANS, **SCALED}, id="means, ep2, scaled gradients"),
        pytest.param(4, {"ep": 2, "etp": 1, **SHARES, **MEANS}, id="means, tp2ep2 of 4 in shares"),
        only_full(4, {"ep": 2, "etp": 1, **SHARES}, id="tokens, tp2ep2 of 4 in shares"),
        only_full(4, {"ep": 2, "etp": 2, **SHARES, **GATHERS}, id="tokens, tp2ep2 with cut experts, allgather"),
        only_full(4, {"ep": 2, "pp": 2, **MEANS}, id="means, pp2ep2"),
    ],
)
def test_losses_and_what_is_printed_of_them_are_those_of_the_stock_loop(on_ranks, size, layout):
    how = {"pieces": (1, 1, 2, 5), "recompute": False}
    for rank in on_ranks(size, "user_plans", seeds=[2], how=how, **{**LOSSES, **layout}):
        for result in rank:
            assert "error" not in result, result
            assert result["grad"] < 1e-9, result
            assert max(result.get("routers", [0.0])) < 1e-4, result  # sums of float32 over layers
        assert rank[0]["cut"]
        assert rank[0]["replayed"]


def test_padding_that_stock_counts_is_said_once_where_it_changes_losses(on_ranks):
    bias = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": None}
    padded, full, without = (
        {**LOSSES, "ep": 2, "full": False},
        {**LOSSES, "ep": 2, **bias},
        {**LOSSES, "ep": 2, **bias, "moe_router_enable_expert_bias": False, "full": False},
    )
    first, second = on_ranks(2, "said_of_padding", cases=[padded, full, without])
    (line,) = first[0]["said"]
    for part in ("padding of rows", "moe_router_enable_expert_bias, moe_z_loss_coeff, seq_aux_loss"):
        assert part in line
    assert first[0]["apart"] > 1e-3
    for rank in (first, second):
        for same in rank[1:]:
            assert not same["said"]
            assert same["apart"] < 1e-9
    assert not second[0]["said"], "rank 0 speaks for all"
