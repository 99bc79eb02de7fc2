"""Jobs on real gloo ranks with the real Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from megatron_tests.calling import call


@pytest.fixture(scope="session")
def trainer() -> str:
    return "megatron"


@pytest.fixture(scope="session")
def all_in_float64() -> Callable[[], Any]:
    """A context in which Transformers computes everything in float64 whose tensors are."""
    from megatron_tests.float64 import all_in_float64

    return all_in_float64


@pytest.fixture(scope="module")
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(4, "job", ...)``: what a function of a file ``*jobs.py`` returned, by rank."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments)

    return run
