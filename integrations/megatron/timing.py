"""How long this rank computes: inside forward and inside backward, waiting for other stages left out.

Forward is the model call. Backward starts when the gradient arrives at the stage's output (a tensor hook) and ends when
the autograd engine has finished that pass (its own end-of-pass callback), so receiving, sending and idling between them
never count. Tensor-parallel collectives happen inside and do count. On CUDA the same two points are recorded as events
and read once per step, so that nothing waits for the device on the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class BusyClock:
    """Sums the seconds of one step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent in the block."""
        start = self._now()
        yield
        self._add(start)

    def watch_backward(self, output: Tensor) -> None:
        """Count the backward pass that will start from ``output``."""
        if output.requires_grad:
            output.register_hook(self._started)  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """Seconds so far."""
        if self._spans:
            self._spans[-1][1].synchronize()
        return self._seconds + sum(float(start.elapsed_time(end)) for start, end in self._spans) / 1e3

    def _started(self, _: Tensor) -> None:
        start = self._now()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._add(start))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, start: float | torch.cuda.Event) -> None:
        now = self._now()
        if isinstance(start, float) and isinstance(now, float):
            self._seconds += now - start
        elif isinstance(start, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._spans.append((start, now))
