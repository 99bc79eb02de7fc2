"""Ranks in threads, and planners that are late, fail, break a law or plan otherwise than their peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evenload.core.plan.step_plan import StepPlan
from evenload.core.registry import get

LIMIT_S = 60


def late(*_: object) -> StepPlan:
    time.sleep(30)
    raise AssertionError("nobody waits for this")


def fails(*_: object) -> StepPlan:
    raise ZeroDivisionError("inside a planner")


def unlawful(bare: StepPlan, *_: object) -> StepPlan:
    return replace(bare, micro_batches=(), made_by="unlawful")


def packed(bare: StepPlan, *rest: Any) -> StepPlan:
    return get("packing").plan(bare, *rest)


def otherwise(bare: StepPlan, *rest: Any) -> StepPlan:
    plan = packed(bare, *rest)
    return replace(plan, micro_batches=plan.micro_batches[::-1])


class Exchange:
    """Tells every rank what all have said."""

    def __init__(self, size: int) -> None:
        self._barrier, self._slots = threading.Barrier(size, timeout=LIMIT_S), [b""] * size

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def swap(payload: bytes) -> list[bytes]:
            self._slots[rank] = payload
            self._barrier.wait()
            told = list(self._slots)
            self._barrier.wait()
            return told

        return swap


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What the work of each rank gives, or the error with which it ended."""
    out: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            out[rank] = work(rank)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out
