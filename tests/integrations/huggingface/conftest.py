"""Jobs on real gloo ranks with the real Trainer."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("deepspeed"))]  # where the job files lie, and plans of 2 and of 4 ranks

LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""Accelerate takes the process group that is there, but asks for what its launcher sets."""


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``<file>.<job>(**arguments)``. Planes that Trainers keep as long as they live are closed."""
    import torch
    from evenload.runtime.world.plane import Plane

    torch.set_num_threads(1)
    file, name = job.split(".")
    planes, make = [], Plane.make

    def kept(*words: Any) -> Plane:
        planes.append(make(*words))
        return planes[-1]

    with patch.dict(os.environ, LAUNCHED), patch.object(Plane, "make", kept):
        result = getattr(import_module(file), name)(**arguments)
    for plane in planes:
        plane.close()
    return result


@pytest.fixture(autouse=True)
def frozen(request: pytest.FixtureRequest) -> None:
    """Each run of a Trainer collects garbage, which takes a quarter of a second where imports are not frozen."""
    if request.node.get_closest_marker("slow"):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def families() -> Any:
    from evenload.api import load_plugins

    load_plugins()
    return import_module("families")


@pytest.fixture(scope="session")
def trainer() -> str:
    return "huggingface"


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(2, "rank_trainer.job", ...)``: the results by rank; see `call`."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments, timeout_s=240.0)

    return run
