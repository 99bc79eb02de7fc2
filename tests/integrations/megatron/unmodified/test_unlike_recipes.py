"""Ranks of unlike recipes end in one error before a token moves, in each of Megatron's loops."""

from __future__ import annotations

import pytest
from megatron_tests.settings import EXPERTS

pytestmark = pytest.mark.slow

CAPS = [{"packing": {"enabled": True, "max_tokens": tokens}} for tokens in (64, 128)]
MODES = [{"moe": {"enabled": True, "mode": mode}} for mode in ("clone", "reroute")]
AUX = {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ("unlike_in_schedule", {"plugins": CAPS, "loop": {}}),
        ("unlike_in_schedule", {"plugins": MODES, "loop": {"ep": 2, **AUX}}),
        ("unlike_in_rows", {"plugins": CAPS}),
    ],
    ids=["planned micro-batches", "fixed micro-batches", "rows"],
)
def test_ranks_of_unlike_recipes_end_before_a_forward(on_ranks, job, settings):
    first, second = on_ranks(2, job, **settings)
    assert first == second
    message, forwards = first
    assert message.startswith("step 1: the ranks hold different plans: no side has a majority")
    assert forwards == 0
