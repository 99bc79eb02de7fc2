"""Jobs on real gloo ranks with the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``rank_jobs.<job>(**arguments)``."""
    name = "deepspeed_rank_jobs"
    if name not in sys.modules:
        import torch

        torch.set_num_threads(1)
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("rank_jobs.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], job)(**arguments)


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(2, "job", ...)``: the results of rank_jobs.job by rank."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments, timeout_s=240.0)

    return run
