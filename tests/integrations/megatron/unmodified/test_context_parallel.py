"""Megatron's context-parallel ranks as data ranks of a plan: gradients and reports of the loop with nothing on."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS, WITHOUT_LOSSES

pytestmark = pytest.mark.slow

PACKS = {"packing": {"enabled": True, "max_tokens": 128}}
CUT = {"packing": {"enabled": True, "max_tokens": 24, "slices": "even"}}
EXPERTS = {**WITHOUT_LOSSES, "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp64"}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"cp": 2, "seeds": (0,)}, id="tokens, cp2"),
        pytest.param(2, {"cp": 2, **MEANS, "overlap": True, "seeds": (0,)}, id="means, cp2"),
        only_full(4, {"cp": 2, **MEANS, "seeds": (1,)}, id="means, dp2cp2"),
        pytest.param(4, {"cp": 2, "pp": 2, **MEANS}, id="means, pp2cp2"),
        only_full(4, {"cp": 2, "tp": 2}, id="tokens, tp2cp2"),
        pytest.param(2, {"cp": 2, "ep": 2, **EXPERTS}, id="tokens, cp2ep2"),
    ],
)
def test_gradients_and_reports_are_those_of_context_parallelism(on_ranks, size, layout):
    for rank in on_ranks(size, "in_context", plugins=[PACKS, CUT], **layout):
        *planned, again = rank
        for result in rank:
            assert result["grad"] < 1e-9, result
            assert result["reports"] < 1e-12
            assert result["dtypes"]
        assert planned[0]["tokens"] < again["tokens"], "padding is computed"
        assert [result["shared"] for result in planned[2:]] == [True] * len(layout.get("seeds", ()))


@pytest.mark.parametrize("mutant", ["one mean for all context ranks", "halves in a row"])
def test_the_proof_catches_planted_faults(on_ranks, mutant):
    for result, _ in on_ranks(2, "in_context", plugins=[PACKS], mutant=mutant, cp=2, **MEANS):
        assert result["grad"] > 1e-4
        assert result["reports"] > 1e-4


def test_a_step_leaves_context_parallelism_as_it_was(on_ranks):
    for found in on_ranks(2, "left_in_context", cp=2):
        assert found["seen"] == [(1,) * 6, (2,) * 6]  # before the first planned step, and as without evenload
        assert found["before"] == (2,) * 6
        assert found["same"]
        told = found["told"]
        assert told["raised"]
        assert "latent attention is not checked" in told["multi_latent_attention"]
        assert "multi-token prediction" in told["mtp_num_layers"]
        assert "does not return (sum of token losses" in told["two values"]
