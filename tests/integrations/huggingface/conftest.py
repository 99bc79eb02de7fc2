"""Jobs on real gloo ranks with the real Trainer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLANS = Path(__file__).parent.parent / "deepspeed"


def load(file: str) -> Any:
    """A module of this folder or of that with the plans, under a name of its own: there is no package to find it in."""
    name = f"huggingface_{file}"
    if name not in sys.modules:
        here = Path(__file__).with_name(f"{file}.py")
        spec = importlib.util.spec_from_file_location(name, here if here.exists() else PLANS / f"{file}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``<file>.<job>(**arguments)``."""
    import torch

    torch.set_num_threads(1)
    file, name = job.split(".")
    return getattr(load(file), name)(load, **arguments)


@pytest.fixture(scope="session")
def trainer() -> str:
    return "deepspeed"


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(2, "rank_trainer.job", ...)``: the results by rank; see `call`."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments, timeout_s=240.0)

    return run
