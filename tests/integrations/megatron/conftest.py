"""Jobs on real gloo ranks with the real Megatron-Core, which wants the CPU bridge before it is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``jobs.<job>(world, **arguments)``."""
    from evenload.patches import bridge_cpu

    name = "megatron_jobs"
    if name not in sys.modules:
        bridge_cpu()
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("jobs.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    from evenload.runtime.world import init_world

    return getattr(sys.modules[name], job)(init_world(), **arguments)


@pytest.fixture
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(4, "job", ...)``: the results of jobs.job by rank."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments)

    return run
