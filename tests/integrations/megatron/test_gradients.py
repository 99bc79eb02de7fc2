"""Gradients of samples from one backward of packs are those of one backward a sample, and change nothing."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
TWO = {"model__num_layers": 2}
LAYOUTS = {
    "alone": (1, TWO),
    "dp2": (2, TWO),
    "tp2": (2, {"parallel__tp": 2, **TWO}),
    "pp2": (2, {"parallel__pp": 2}),
}


@pytest.mark.parametrize(
    ("layout", "plans"),
    [
        pytest.param("alone", [11], id="alone"),
        pytest.param("tp2", [0], id="tp2"),
        only_full("pp2", [11], id="pp2"),
        pytest.param("dp2", ["pairs"], id="shared by two"),
        only_full("dp2", ["pairs", "shared 100"], id="shared by two, all"),
        *(only_full(layout, [1, 2], id=f"{layout}, all") for layout in LAYOUTS),
    ],
)
def test_rows_are_those_of_one_backward_a_sample(on_ranks, layout, plans):
    size, changes = LAYOUTS[layout]
    for result in on_ranks(size, "by_sample", plans=plans, **changes):
        assert result["changed"] == []
        assert "adapter.target_modules names no linear layer" in result["refused"]
        for row in result["rows"]:
            assert row["rows"] < 1e-9, row
            assert row.get("adam", 0.0) < 1e-9, row
            assert row["backward"] < 1e-9, row
            assert row.get("forwards", 0.0) < 1e-3, row
            assert row["losses"] < 1e-9, row


@pytest.mark.parametrize(
    ("size", "layout"), [pytest.param(*LAYOUTS["alone"], id="alone"), only_full(*LAYOUTS["pp2"], id="pp2")]
)
def test_less_takes_what_is_like_the_validation(on_ranks, size, layout):
    for result in on_ranks(size, "selected", **layout):
        assert result["taken"] == list(range(0, 24, 3))
        assert result["along"] == result["taken"]
        assert result["way"] == "backward", "two batches are too few to try both"


@pytest.mark.parametrize("dtype", ["fp32", only_full("fp64")])
def test_two_forwards_give_products_at_the_step_that_they_choose(on_ranks, dtype):
    results = on_ranks(2, "ways", train__dtype=dtype, **TWO)
    for result in results:
        assert result["forwards"] < 1e-3
        assert result["differs"] < 1e-2
        assert result["ranks"] >= 0.999
        assert result["cheaper"] < 1e-3
        assert set(result["seconds"]) == {"backward", "forwards"}
        assert result["way"] == results[0]["way"] == min(result["seconds"], key=result["seconds"].get)
        assert result["number"] == 32
