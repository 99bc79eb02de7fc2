"""A host's samples are those of Transformers' own model, token for token, whatever ZeRO divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
ALL = {"slots": 64}
SMALL = {"slots": 3, "cache_tokens": 80, "step_tokens": 7}
CASES = {
    "ZeRO 0": (1, 0, [ALL, SMALL]),
    "ZeRO 1": (1, 1, [{**SMALL, "moves": 1}]),
    "ZeRO 2": (1, 2, [{"slots": 1}]),
    "ZeRO 3": (1, 3, [ALL, {"slots": 3, "moves": 2}]),
    "a pipeline": (2, 1, [SMALL]),
}


@pytest.mark.parametrize(
    "name", [name if name in ("ZeRO 1", "ZeRO 3", "a pipeline") else only_full(name) for name in CASES]
)
def test_samples_are_those_of_plain_generation(on_ranks: Callable[..., list[Any]], name: str) -> None:
    pp, stage, ways = CASES[name]
    for result in on_ranks(2, "generate_jobs.generated", pp=pp, stage=stage, ways=ways):
        assert not result["changed"]
        assert result["training"]
        for row, way in zip(result["ways"], ways, strict=True):
            assert row["samples"]
            assert bool(row["moved"]) == ("moves" in way)
            assert row["other"] == 0
            assert row["ties"] <= 1
            assert row["error"] < 1e-5


def test_in_float64_no_token_and_no_log_probability_differs(on_ranks: Callable[..., list[Any]]) -> None:
    (result,) = on_ranks(1, "generate_jobs.in_float64")
    for row in result["ways"]:
        assert row["other"] == 0
        assert row["error"] < 1e-9
