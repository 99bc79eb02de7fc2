"""How long a rank computes, forward and backward apart; waiting for other ranks and stages is left out.

What counts as a second depends on the device.

    CUDA          events on the current stream, read once a step, so that nothing waits for the device on the way
    CPU, one      CPU time of the calling thread. It stands still while the rank waits and while another process has the
    thread        core, so busiest over mean rank does not depend on who shares the machine. Sound because forward *and*
                  autograd's backward of CPU tensors run in the calling thread (its engine gives threads of their own to
                  other devices only; measured on a shared core: wall 0.75 s, thread 0.45 s, whole process 0.45 s)
    CPU, several  wall time: the calling thread does only its share of the work
    threads
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["F", "B"]


class Busy(NamedTuple):
    """Seconds of one step."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def cpu_clock() -> Callable[[], float]:
    """Seconds of compute on the CPU: of this thread where it computes alone, else of the wall."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class BusyClock:
    """Sums the seconds of one step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._now = _event if self._cuda else cpu_clock()
        self._spans: list[tuple[Kind, Any, Any]] = []

    @contextmanager
    def running(self, kind: Kind) -> Iterator[None]:
        """Count the block as forward or backward."""
        start = self._now()
        yield
        self._spans.append((kind, start, self._now()))

    def watch_backward(self, output: Tensor) -> None:
        """Count the backward pass that will start from ``output``, wherever it is called.

        It starts when the gradient arrives at ``output`` (a tensor hook) and ends when the autograd engine has finished
        that pass (its own end-of-pass callback), so receiving and sending between passes never count.
        """
        if output.requires_grad:
            output.register_hook(self._started)  # type: ignore[no-untyped-call]

    def read(self) -> Busy:
        """Seconds so far. Waits for the device."""
        if self._cuda and self._spans:
            self._spans[-1][2].synchronize()
        sums = {"F": 0.0, "B": 0.0}
        for kind, start, end in self._spans:
            sums[kind] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return Busy(sums["F"], sums["B"])

    def _started(self, _: Tensor) -> None:
        start = self._now()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._spans.append(("B", start, self._now())))


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
