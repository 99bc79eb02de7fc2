"""Worlds of 1, 2 and 4 gloo ranks on the real Megatron-Core, started when first asked for and kept for the session."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("megatron_workers", Path(__file__).with_name("workers.py"))
_workers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_workers)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    """``ranks(n)`` is a pool of n ranks."""
    pools: dict[int, Any] = {}

    def pool(size: int) -> Any:
        if size not in pools:
            pools[size] = _workers.Pool(size, tmp_path_factory.mktemp(f"world{size}") / "store")
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
