"""Loops whose micro-batches stay as they are, as losses or drops of their experts depend on them."""

from __future__ import annotations

import pytest
from megatron_tests.settings import EXPERTS, MEANS, WITHOUT_LOSSES

pytestmark = pytest.mark.slow

AUX = {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}
SINKHORN = {**EXPERTS, "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
DROPS = {**WITHOUT_LOSSES, "moe_expert_capacity_factor": 1.0}
GLOBAL = {**AUX, "moe_router_load_balancing_type": "global_aux_loss"}
COPIES = {"moe": {"enabled": True, "tolerance": 1.0}}
ORDERS = {"pipeline": {"enabled": True}}
PACKS = {"packing": {"enabled": True, "max_tokens": 64}}


def exact(results):
    for rank in results:
        for found in rank:
            assert max(found["grad"], found["again"]) < 1e-9, found
            assert found["reports"] < 1e-9
            assert max(found["routers"].values(), default=0.0) < 1e-5
            assert found["shapes"]
            assert found["finite"]
    return zip(*results, strict=True)


def test_copies_of_experts_leave_losses_and_drops_of_micro_batches_as_they_are(on_ranks):
    cases = [({**COPIES, **PACKS}, {"ep": 2, **each}) for each in (AUX, {**SINKHORN, **MEANS}, DROPS, GLOBAL)]
    for of_case in exact(on_ranks(2, "kept_together", cases=cases)):
        assert all(found["copies"] > 0 and found["plans"] == 1 and not found["idle"] for found in of_case)


def test_an_order_of_whole_micro_batches(on_ranks):
    cases = [({**ORDERS, **COPIES}, {"ep": 2, "pp": 2, **AUX, **MEANS}), (ORDERS, {"tp": 2, "etp": 1, "ep": 2} | LOOP)]
    for number, of_case in enumerate(exact(on_ranks(4, "kept_together", cases=cases))):
        assert all(found["ordered"] for found in of_case)
        assert any(found["copies"] for found in of_case) == (number == 0)


LOOP = {"pp": 2, "sequence_parallel": True, **SINKHORN}


def test_a_loop_in_which_no_plugin_has_anything_to_do_is_left_alone_and_says_so_once(on_ranks):
    of_cases = list(exact(on_ranks(2, "kept_together", cases=[(PACKS, {"ep": 2, **AUX})])))
    first, second = of_cases[0]
    assert first["plans"] == second["plans"] == 0
    assert len(first["idle"]) == 1
    assert "moe_router_load_balancing_type aux_loss" in first["idle"][0]
    assert "plugins.packing would regroup" in first["idle"][0]


def test_a_balance_loss_of_sequences_is_refused_where_a_row_holds_several():
    from types import SimpleNamespace

    from evenload.core.errors import EvenloadError
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from evenload.integrations.megatron.unmodified.refusals.layers import refuse_losses_of_rows

    on = SimpleNamespace(moe_router_load_balancing_type=["seq_aux_loss"], moe_aux_loss_coeff=[1e-2])
    off = SimpleNamespace(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    refuse_losses_of_rows(on, has_borders=False)
    refuse_losses_of_rows(off, has_borders=True)
    with pytest.raises(EvenloadError, match="takes a row of a batch for one sequence"):
        refuse_losses_of_rows(on, has_borders=True)
