"""Jobs on real gloo ranks with the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``<file>.<job>(**arguments)`` of this folder, ``rank_jobs.<job>`` where `job` names no file."""
    import torch

    torch.set_num_threads(1)
    *file, name = job.split(".")
    return getattr(load(file[0] if file else "rank_jobs"), name)(**arguments)


def load(file: str) -> ModuleType:
    """A module of this folder, under a name of its own: there is no package to find it in."""
    name = f"deepspeed_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def trainer() -> str:
    return "deepspeed"


@pytest.fixture(scope="session")
def slice_plans() -> ModuleType:
    return load("slice_plans")


@pytest.fixture(scope="session")
def shared_plans() -> ModuleType:
    return load("shared_plans")


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(2, "job", ...)``: the results of rank_jobs.job by rank; see `call`."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments, timeout_s=240.0)

    return run
