"""Virtual pipeline stages in a loop that nobody edits: gradients and reports of the stock loop."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS, WITHOUT_LOSSES

BATCHED = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
FLUSH = {"overlap_p2p_comm_warmup_flush": True}
LAYOUT = {"pipeline_model_parallel_layout": "E|tt|t|tL"}
THREE = {"virtual_stages": 3, "micro_batches": 6, "microbatch_group_size_per_vp_stage": 3}
DISTRIBUTED = {"overlap": True, "distributed_optimizer": True, "aligned": True}
EXPERTS = {**WITHOUT_LOSSES, "add_bias_linear": False, "bias_activation_fusion": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"pp": 2, **LAYOUT}, id="pp2, tokens, layout"),
        pytest.param(2, {"pp": 2, **MEANS, **THREE, "values": 2}, id="pp2, means, groups of three"),
        pytest.param(2, {"pp": 2, **EXPERTS}, id="pp2, experts"),
        only_full(4, {"pp": 2, **MEANS, **DISTRIBUTED}, id="dp2pp2, means, overlap"),
        pytest.param(4, {"pp": 2, "tp": 2, "lone": True, **FLUSH}, id="tp2pp2, flush, one iterator"),
        only_full(4, {"pp": 4, **BATCHED, "lone": True, **MEANS}, id="pp4, batched, means"),
    ],
)
def test_packs_give_the_gradients_of_the_interleaved_loop(on_ranks, size, layout):
    for rank in on_ranks(size, "packs_in_chunks", **layout):
        *packed, stock = rank
        for result in packed:
            assert result["grad"] < 1e-9, result
            assert result["reports"] < 1e-12, result
            assert result["rows"] == {1}
            assert result["tokens"] < stock["tokens"]
            assert result["next"], "iterators stand where the stock loop leaves them"
        assert stock["grad"] < 1e-12


@pytest.mark.slow
def test_a_loop_of_chunks_that_cannot_be_planned_is_told_why(on_ranks):
    for told in on_ranks(2, "told_of_chunks", pp=2):
        assert "the chunks of a rank are given other samples" in told["other samples"]
        assert "2 model chunks" in told["order"]
        assert told["end"] == "the end"


@pytest.mark.slow
def test_dummies_fill_up_to_the_least_number_that_the_schedule_takes(on_ranks):
    assert on_ranks(1, "numbers_of_packs") == [[]]
