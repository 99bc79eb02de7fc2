"""How a rank runs a job, a function of a file ``*jobs.py``, which it imports when a job of it is first asked for."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def call(job: str, arguments: dict[str, Any]) -> Any:
    """``job(world, **arguments)``, on this rank."""
    from evenload.runtime.world.world import init_world

    return _function_of(job)(init_world(), **arguments)


@functools.cache
def _function_of(job: str) -> Callable[..., Any]:
    from evenload.patches import bridge_cpu

    bridge_cpu()  # before Megatron-Core is imported
    begins = re.compile(rf"^def {job}\(\s*world\b", re.MULTILINE)
    (file,) = (path for path in Path(__file__).parent.glob("*jobs.py") if begins.search(path.read_text()))
    return getattr(import_module(f"megatron_tests.{file.stem}"), job)
