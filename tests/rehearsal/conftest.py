"""Worlds of ranks with a rehearsed GPU, and the jobs of the trainers' own tests on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.world import World

from .asked import units_asked
from .nccl import broken

TESTS = Path(__file__).parents[1]


def module_at(path: str) -> ModuleType:
    """A module of the tests by its path below them: there is no package to find it in."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worlds(
    forge: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], Any]]:
    """``worlds("megatron", 2)``: ranks with a GPU each; see `world` of the tests' own conftest."""
    kind = type_of_world()
    worlds: dict[tuple[str, int], Any] = {}

    def get(trainer: str, size: int) -> Any:
        key = trainer, size
        if key not in worlds or not worlds[key].active:
            worlds[key] = kind(forge(f"cuda+{trainer}"), size, tmp_path_factory.mktemp(f"world{size}"))
        return worlds[key]

    yield get
    for one in worlds.values():
        if one.active:
            one.close()


def type_of_world() -> Any:
    return World


@pytest.fixture(scope="module")
def jobs(worlds: Callable[[str, int], Any]) -> Callable[[str], Callable[..., list[Any]]]:
    """``jobs("megatron")(4, "job", ...)``: a job of that trainer's tests, on ranks with a GPU each."""

    def of(trainer: str) -> Callable[..., list[Any]]:
        call = module_at(f"integrations/{trainer}/conftest.py").call

        def on_ranks(size: int, job: str, **arguments: Any) -> list[Any]:
            world = worlds(trainer, size)
            results: list[Any] = world.run(call, job, arguments, timeout_s=240.0)
            assert not broken(dict(enumerate(world.run(units_asked))))
            return results

        return on_ranks

    return of
