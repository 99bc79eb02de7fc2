"""Worlds of ranks with a rehearsed GPU, and the jobs of the trainers' own tests on them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.world import World

from .asked import units_asked
from .nccl import broken
from .seen import Seen, seen_in

TESTS = Path(__file__).parents[1]


def module_at(path: str) -> ModuleType:
    """A module of the tests by its path below them: there is no package to find it in."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def enabling(recipe: Path) -> str:
    """What switches evenload on in every rank, as ``evenload run`` does."""
    return f"import evenload; evenload.enable({str(recipe)!r})"


HEAD = f"""
import json, os, sys
sys.path.insert(0, {str(TESTS)!r})
import rehearsal
rehearsal.install()
"""


def said_by(program: str, *arguments: str, limit_s: float = 200, **environment: str) -> str:
    """What a program with a rehearsed GPU of its own wrote, which ends well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", **environment}
    command = [sys.executable, "-c", HEAD + program, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def rehearse(forge: Callable[[str], Any], tmp_path: Path) -> Callable[..., tuple[Any, Seen]]:
    """``rehearse("megatron", ("train", ...))``: two ranks end well, doing nothing that a GPU refuses; what was seen."""

    def run(
        trainer: str, words: tuple[str, ...], ranks: int = 2, planted: str = "", place: Path = tmp_path, **more: Any
    ) -> tuple[Any, Seen]:
        place.mkdir(exist_ok=True)
        done = forge(f"cuda+{trainer}").run(place, words, ranks, planted, **more)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
        seen = seen_in(done.outputs)
        seen.check()
        return done, seen

    return run


@pytest.fixture
def on_ranks(worlds: Callable[[str, int], World]) -> Callable[..., list[Any]]:
    """``on_ranks(4, "job", ...)``: a job of the tests of Megatron-Core, on ranks with a GPU each."""
    call = module_at("integrations/megatron/conftest.py").call

    def run(size: int, job: str, **arguments: Any) -> list[Any]:
        world = worlds("cuda+megatron", size)
        results: list[Any] = world.run(call, job, arguments, timeout_s=240.0)
        assert not broken(dict(enumerate(world.run(units_asked))))
        return results

    return run
