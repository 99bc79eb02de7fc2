"""Jobs on real gloo ranks with the real DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest


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
