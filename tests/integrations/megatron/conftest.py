"""Jobs on real gloo ranks with the real Megatron-Core, which wants the CPU bridge before it is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = (
    "float64",
    "random_plans",
    "shared_plans",
    "jobs",
    "slice_jobs",
    "shared_jobs",
    "pipeline_jobs",
    "expert_jobs",
    "score_jobs",
    "generate_jobs",
    "pretrained_jobs",
    "tenant_jobs",
    "gradient_jobs",
    "soak_jobs",
    "isolation_jobs",
    "peft_jobs",
    "dropout_jobs",
    "hybrid_model",
    "user_jobs",
    "together_jobs",
    "hybrid_jobs",
    "form_jobs",
    "objective_jobs",
    "mesh_jobs",
    "context_jobs",
    "chunk_jobs",
    "unlike_jobs",
    "memory_jobs",
)


def call(job: str, arguments: dict[str, Any]) -> Any:
    """Runs on a rank: ``job(world, **arguments)`` of one of the `JOBS`; each of these may import those before it."""
    from evenload.patches import bridge_cpu

    if "megatron_jobs" not in sys.modules:
        bridge_cpu()
        for file in JOBS:
            spec = importlib.util.spec_from_file_location(f"megatron_{file}", Path(__file__).with_name(f"{file}.py"))
            sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])
    from evenload.runtime.world.world import init_world

    cp_group = next(module for file in JOBS if hasattr(module := sys.modules[f"megatron_{file}"], job))
    return getattr(cp_group, job)(init_world(), **arguments)


@pytest.fixture(scope="session")
def trainer() -> str:
    return "megatron"


@pytest.fixture(scope="session")
def all_in_float64() -> Callable[[], Any]:
    """A context in which Transformers computes everything in float64 whose tensors are."""
    spec = importlib.util.spec_from_file_location("megatron_float64", Path(__file__).with_name("float64.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.all_in_float64


@pytest.fixture(scope="module")
def on_ranks(world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """``on_ranks(4, "job", ...)``: the results of jobs.job by rank."""

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        return world(size).run(call, job, arguments)

    return run
