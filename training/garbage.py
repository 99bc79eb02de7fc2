"""Python's garbage on all ranks at once, as Megatron-LM's ``--manual-gc`` and torchtitan do it.

Python collects garbage whenever a rank has made so many objects, so one rank after the other pauses within a step and
all the others wait for it. Here nobody does so inside a step: after every ``train.gc_every``-th one all ranks collect
together. What was alive before the first step (modules, the model) is left out of it (`gc.freeze`), so that a
collection looks at what the steps have made alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Collect = Callable[[int], None]


@contextmanager
def collected(every: int | None) -> Iterator[Collect]:
    """Inside, garbage is collected by the call that is yielded alone, after every so many steps; None: by Python, as
    ever. The call is given the number of steps that are done."""
    if every is None or not gc.isenabled():
        yield lambda _: None
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda done: None if done % every else _collect()
    finally:
        gc.enable()
        gc.unfreeze()


def _collect() -> None:
    gc.collect()


class Pauses:
    """Seconds in which Python has collected garbage in this process since this module was imported."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        """Note that a collection starts or stops: one of `gc.callbacks`."""
        if phase == "start":
            self._start_s = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._start_s


PAUSES = Pauses()
gc.callbacks.append(PAUSES)
