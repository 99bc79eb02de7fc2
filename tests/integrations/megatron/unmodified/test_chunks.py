"""Virtual pipeline stages and multi-token prediction in a loop that nobody edits: what the stock loop gives."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS, WITHOUT_LOSSES

BATCHED = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
FLUSH = {"overlap_p2p_comm_warmup_flush": True}
LAYOUT = {"pipeline_model_parallel_layout": "E|tt|t|tL"}
THREE = {"virtual_stages": 3, "micro_batches": 6, "microbatch_group_size_per_vp_stage": 3}
DISTRIBUTED = {"overlap": True, "distributed_optimizer": True}
EXPERTS = {**WITHOUT_LOSSES, "add_bias_linear": False, "bias_activation_fusion": False}
ONE = {"virtual_stages": 1, "num_layers": 2}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"pp": 2, **LAYOUT}, id="pp2, tokens, layout"),
        pytest.param(2, {"pp": 2, **MEANS, **THREE, "values": 2}, id="pp2, means, groups of three"),
        pytest.param(2, {"pp": 2, **EXPERTS}, id="pp2, experts"),
        only_full(4, {"pp": 2, **MEANS, **DISTRIBUTED, "aligned": True}, id="dp2pp2, means, overlap"),
        pytest.param(4, {"pp": 2, "tp": 2, "lone": True, **FLUSH}, id="tp2pp2, flush, one iterator"),
        only_full(4, {"pp": 4, **BATCHED, "lone": True, **MEANS}, id="pp4, batched, means"),
        pytest.param(1, {"pp": 1, **ONE, "mtp_num_layers": 2}, id="further tokens of two layers, one"),
        pytest.param(2, {"pp": 1, **ONE, "mtp_num_layers": 1, **MEANS}, id="further tokens, dp2, means"),
        only_full(2, {"pp": 2, **ONE, "mtp_num_layers": 1, **MEANS}, id="further tokens, pp2, means"),
        pytest.param(4, {"pp": 2, "mtp_num_layers": 1, **DISTRIBUTED}, id="further tokens, dp2pp2, overlap"),
        only_full(4, {"pp": 2, "tp": 2, **ONE, "mtp_num_layers": 2, **MEANS}, id="further tokens, tp2pp2, means"),
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
            assert result["further"] is None or result["further"] < 1e-6, result
            assert result["next"], "iterators stand where the stock loop leaves them"
        assert stock["grad"] < 1e-12
    assert (rank[0]["further"] is not None) == ("mtp_num_layers" in layout), "the last stage predicts further tokens"


def test_multi_token_prediction_without_a_loss_mask_is_refused_and_nothing_is_left_behind(on_ranks):
    (told,) = on_ranks(1, "told_of_further_tokens")
    assert told["left"] == [True] * 4
    assert "pass loss_mask=batch['loss_mask'] to the model" in told["no mask"]


def test_a_loop_of_chunks_that_cannot_be_planned_is_told_why(on_ranks):
    for told in on_ranks(2, "told_of_chunks", pp=2):
        assert "the chunks of a rank are given other samples" in told["other samples"]
        assert "2 model chunks" in told["order"]
        assert told["end"] == "the end"


def test_dummies_fill_up_to_the_least_number_that_the_schedule_takes(on_ranks):
    assert on_ranks(1, "numbers_of_packs") == [[]]
