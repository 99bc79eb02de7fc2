"""A host's samples are those of plain generation, token for token, however ranks, slots and caches divide the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ALL = {"slots": 64}
SMALL = {"slots": 4, "cache_tokens": 80, "step_tokens": 9}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "data parallel": ({}, [{"slots": 1}, {"slots": 64, "backwards": True}, {"moves": 1}, {**SMALL, "moves": 2}]),
    "tensor parallel": ({"parallel__tp": 2}, [ALL, SMALL, {**SMALL, "moves": 3}]),
    "a pipeline": ({"parallel__pp": 2}, [ALL, SMALL, {**ALL, "moves": 4}]),
    "stages of tensor-parallel ranks": ({"parallel__pp": 2, "parallel__tp": 2}, [{"slots": 5}]),
}


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_plain_generation(on_ranks: Callable[..., list[Any]], name: str) -> None:
    changes, ways = CASES[name]
    results = on_ranks(4, "generated", ways=ways, **changes)
    for result in results:
        assert not result["changed"]
        for row, way in zip(result["ways"], ways, strict=True):
            assert row["keys"]
            assert row["other"] == 0
            assert row["error"] < 1e-9
            assert row["ended"] == ["end", "limit"]
            assert bool(row["moved"]) == ("moves" in way)
    for number in range(len(ways)):
        seen = [key for result in results for key in result["ways"][number]["seen"]]
        assert sorted(seen) == sorted((prompt, sample) for prompt in range(4) for sample in (0, 1))


def test_moves_between_two_ranks_change_no_token(on_ranks: Callable[..., list[Any]]) -> None:
    ways = [{"moves": 5}, {"slots": 3, "moves": 6}]
    for result in on_ranks(2, "generated", ways=ways):
        assert [(row["keys"], row["other"], row["moved"] > 2) for row in result["ways"]] == [(True, 0, True)] * 2
        assert max(row["error"] for row in result["ways"]) < 1e-9


LONG = [(0, (1, 2, 3), 8), (1, (4, 5), 126)]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to continue": ({"requests": []}, "there is no prompt"),
    "an empty prompt": ({"requests": [(0, (), 3)]}, "prompt 0 has no token"),
    "a token beyond the vocabulary": ({"requests": [(4, (1, 96), 3)]}, "prompt 4 has tokens that the model does not"),
    "no token wanted": ({"requests": [(2, (1,), 0)]}, "no token may follow prompt 2"),
    "beyond the model": ({"requests": LONG, "data__max_length": 127}, "prompt 1 and what may follow are longer"),
    "a cap below one sample": ({"requests": LONG, "slots": 112}, "smaller than one sample"),
    "a V": (
        {"requests": LONG, "parallel__pp": 2, "plugins__pipeline": {"enabled": True, "v_shape": True}},
        "two stages a device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_generated_is_said_before_the_first_token(on_ranks: Callable[..., list[Any]], name: str) -> None:
    arguments, text = REFUSED[name]
    size = 2 if "parallel__pp" in arguments else 1
    assert all(text in said for said in on_ranks(size, "generation_refused", **arguments))


def test_experts_are_refused_by_name(on_ranks: Callable[..., list[Any]]) -> None:
    experts = {"model__family": "mixtral", "model__moe": {"num_experts": 4}, "parallel__ep": 2}
    assert all("parallel.ep 2" in said for said in on_ranks(2, "generation_refused", requests=LONG, **experts))
