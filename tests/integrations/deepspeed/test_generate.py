"""A host's samples are those of Transformers' own model, token for token, whatever ZeRO divides."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

ALL = {"slots": 64}
SMALL = {"slots": 3, "cache_tokens": 80, "step_tokens": 7}


@pytest.mark.parametrize(
    ("pp", "stage", "ways"),
    [
        only_full(1, 0, [ALL, SMALL], id="ZeRO 0"),
        pytest.param(1, 1, [{**SMALL, "moves": 1}], id="ZeRO 1"),
        only_full(1, 2, [{"slots": 1}], id="ZeRO 2"),
        pytest.param(1, 3, [ALL, {"slots": 3, "moves": 2}], id="ZeRO 3"),
        pytest.param(2, 1, [SMALL], id="a pipeline"),
    ],
)
def test_samples_are_those_of_plain_generation(on_ranks, pp, stage, ways):
    for result in on_ranks(2, "generate_jobs.generated", pp=pp, stage=stage, ways=ways):
        assert not result["changed"]
        assert result["training"]
        for row, way in zip(result["ways"], ways, strict=True):
            assert row["samples"]
            assert bool(row["moved"]) == ("moves" in way)
            assert row["other"] == 0
            assert row["ties"] <= 1
            assert row["error"] < 1e-5


def test_in_float64_no_token_and_no_log_probability_differs(on_ranks):
    (result,) = on_ranks(1, "generate_jobs.in_float64")
    for row in result["ways"]:
        assert row["other"] == 0
        assert row["error"] < 1e-9
