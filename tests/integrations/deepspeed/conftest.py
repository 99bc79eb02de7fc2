"""Jobs on real gloo ranks with the real DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
from harness.proof import ROUNDING, caught, exact


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``<file>.<job>(**arguments)`` of this folder, ``jobs.<job>`` where `job` names no file."""
    import torch

    torch.set_num_threads(1)
    file, _, name = job.rpartition(".")
    return getattr(import_module(f"deepspeed_tests.{file or 'jobs'}"), name)(**arguments)


@pytest.fixture(scope="session")
def trainer() -> str:
    return "deepspeed"


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(2, "job", ...)``: what a function of the job files beside this one returned, by rank; see `call`."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments, timeout_s=240.0)

    return run


@pytest.fixture
def exactness(on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``exactness(2, stage=1, names=["packs"])``: what `jobs.exactness` found on each rank, where all is exact."""

    def run(size: int, rounding: float = ROUNDING, bounds: Any = None, **asked: Any) -> list[Any]:
        results = on_ranks(size, "exactness", **asked)
        exact([result["found"][0] for result in results], rounding, copies=asked.get("pp", 1), **bounds or {})
        assert all(result["moved"] == 0 for result in results)
        return results

    return run


@pytest.fixture
def unnoticed(on_ranks: Callable[..., list[Any]]) -> Callable[..., list[str]]:
    """The planted faults that the errors of a plan do not show; before and after them it is exact."""

    def run(size: int, faults: Sequence[str], **asked: Any) -> list[str]:
        results = on_ranks(size, "exactness", faults=["", *faults, ""], **asked)
        sound, *broken, again = zip(*(result["found"] for result in results), strict=True)
        for found in (sound, again):
            exact(found, ROUNDING, copies=asked.get("pp", 1))
        return [name for name, found in zip(faults, broken, strict=True) if not caught(found)]

    return run
