"""Multi-token prediction in a loop that nobody edits: gradients and printed losses of the stock loop."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS

pytestmark = pytest.mark.slow

DISTRIBUTED = {"overlap": True, "distributed_optimizer": True}
ONE = {"virtual_stages": 1, "num_layers": 2}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, {"pp": 1, **ONE, "mtp_num_layers": 2}, id="one, tokens, two layers"),
        pytest.param(2, {"pp": 1, **ONE, "mtp_num_layers": 1, **MEANS}, id="dp2-means"),
        only_full(2, {"pp": 2, **ONE, "mtp_num_layers": 1, **MEANS}, id="pp2, means"),
        pytest.param(4, {"pp": 2, "mtp_num_layers": 1, **DISTRIBUTED}, id="dp2pp2, chunks, tokens, overlap"),
        only_full(4, {"pp": 2, "tp": 2, **ONE, "mtp_num_layers": 2, **MEANS}, id="tp2pp2, means, two layers"),
    ],
)
def test_multi_token_prediction_on_packs_gives_the_gradients_and_losses_of_the_loop(on_ranks, size, layout):
    for rank in on_ranks(size, "packs_in_chunks", **layout):
        *packed, stock = rank
        for result in packed:
            assert result["grad"] < 1e-9, result
            assert result["reports"] < 1e-12, result
            assert result["further"] is None or result["further"] < 1e-6, result
            assert result["tokens"] < stock["tokens"]
        assert stock["grad"] < 1e-12
    assert rank[0]["further"] is not None, "the last stage predicts further tokens"


def test_multi_token_prediction_without_a_loss_mask_is_refused_and_nothing_is_left_behind(on_ranks):
    (told,) = on_ranks(1, "told_of_further_tokens")
    assert told["left"] == [True] * 4
    assert "pass loss_mask=batch['loss_mask'] to the model" in told["no mask"]
