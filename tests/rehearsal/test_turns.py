"""Halves that take turns on two streams, in float64, on a rehearsed GPU whose side streams run as late as they may."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import module_at

pytestmark = [pytest.mark.slow, pytest.mark.cuda]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("size", "layout"), [(2, {"parallel__tp": 2}), (4, {"parallel__tp": 2})], ids=["tp2", "cp2"])
def test_halves_that_take_turns(jobs: Any, size: int, layout: dict[str, Any], recompute: bool) -> None:
    tests = module_at("integrations/megatron/test_turns.py")
    plans = tests.TURNS[: 6 if size == 2 else 3]
    changes = {**tests.TWO, **layout, "drawn": {"recompute": recompute}}
    tests.exact(jobs("megatron")(size, "proven", plans=plans, **changes), layout)
