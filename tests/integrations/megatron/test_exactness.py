"""Planned, packed steps against plain training of the same weights, on the real Megatron-Core."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {}, id="dp2"),
    pytest.param(2, {"parallel__tp": 2}, id="tp2"),
    pytest.param(2, {"parallel__pp": 2}, id="pp2"),
    pytest.param(4, {"parallel__tp": 2, "parallel__pp": 2}, id="tp2pp2"),
    pytest.param(4, {"parallel__pp": 2}, id="dp2pp2"),
    pytest.param(4, {"parallel__tp": 2}, id="dp2tp2"),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_float64_gradients_are_those_of_plain_training(ranks, size, layout):
    for result in ranks(size).run("exactness", **layout):
        assert result["loss"] < 1e-12
        assert result["grad"] < 1e-9
        assert result["targets"] == 37 + 5 + 64 + 2 + 18 + 41 + 9 + 23 - 8
