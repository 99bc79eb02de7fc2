"""How long a rank computes, forward and backward apart; waiting for other ranks and stages is left out.

What counts as a second depends on the device.

    CUDA          events on the current stream, read once a step, so that nothing waits for the device on the way
    CPU, one      CPU time of the calling thread. It stands still while the rank waits and while another process has the
    thread        core, so busiest over mean rank does not depend on who shares the machine. Sound because forward *and*
                  autograd's backward of CPU tensors run in the calling thread (its engine gives threads of their own to
                  other devices only; measured on a shared core: wall 0.75 s, thread 0.45 s, whole process 0.45 s)
    CPU, several  wall time: the calling thread does only its share of the work
    threads

Besides its seconds every block has a place on the wall clock: `BusyClock.spans` tells what ran when. On the CPU that is
``time.perf_counter``, one clock for all processes of a machine; on CUDA the same events, counted from a first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.simulate.step import SPAN_KINDS, Span, SpanKind


class Busy(NamedTuple):
    """Seconds in which a rank computed in one step."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def cpu_clock() -> Callable[[], float]:
    """Seconds of compute on the CPU: of this thread where it computes alone, else of the wall."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class _Moment(NamedTuple):
    """One reading of both clocks: floats in seconds, or one CUDA event for both."""

    busy: Any
    wall: Any


class _TimedBlock(NamedTuple):
    kind: SpanKind
    micro_batch: int
    start: _Moment
    end: _Moment


def counts_waiting(device: torch.device) -> bool:
    """Whether seconds hold what a pass waits for inside: everywhere but on a CPU thread that computes alone."""
    return device.type == "cuda" or cpu_clock() is not time.thread_time


class BusyClock:
    """Sums the seconds of one step, from here on. ``record``: whether anyone will ask for `spans`; what is no compute
    is noted only then."""

    def __init__(self, device: torch.device, *, record: bool = False) -> None:
        self._cuda, self._record = device.type == "cuda", record
        self._busy_now = cpu_clock()
        self._blocks: list[_TimedBlock] = []
        self._start = self._now()

    @contextmanager
    def running(self, kind: SpanKind, micro_batch: int = -1) -> Iterator[None]:
        """Count the block as forward (F) or backward (B; R: a forward that is run again; W: weight gradients)."""
        start = self._now()
        yield
        self._blocks.append(_TimedBlock(kind, micro_batch, start, self._now()))

    def noting(self, kind: SpanKind) -> AbstractContextManager[None]:
        """Note a block that is not counted: the gradient sum (G), the update (U)."""
        return self.running(kind) if self._record else nullcontext()

    def watch_backward(self, output: Tensor, micro_batch: int = -1) -> None:
        """Count the backward pass that will start from ``output``, wherever it is called.

        It starts when the gradient arrives at ``output`` (a tensor hook) and ends when the autograd engine has finished
        that pass (its own end-of-pass callback), so receiving and sending between passes never count.
        """
        if output.requires_grad:
            output.register_hook(partial(self._started, micro_batch))  # type: ignore[no-untyped-call]

    def read(self) -> Busy:
        """Seconds so far. Waits for the device."""
        self._wait()
        sums = dict.fromkeys(SPAN_KINDS, 0.0)
        for block in self._blocks:
            sums[block.kind] += self._between(block.start.busy, block.end.busy)
        return Busy(sums["F"], sums["R"] + sums["B"] + sums["W"])

    def spans(self, stage: int, rank: int) -> tuple[Span, ...]:
        """What ran when, in seconds since this clock was made; empty unless it records. Waits for the device."""
        if not self._record:
            return ()
        self._wait()
        return tuple(
            Span(stage, rank, kind, number, *(self._between(self._start.wall, at.wall) for at in (start, end)))
            for kind, number, start, end in self._blocks
        )

    def _started(self, micro_batch: int, _: Tensor) -> None:
        start = self._now()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._blocks.append(_TimedBlock("B", micro_batch, start, self._now())))

    def _now(self) -> _Moment:
        if self._cuda:
            event = cuda_event()
            return _Moment(event, event)
        return _Moment(self._busy_now(), time.perf_counter())

    def _wait(self) -> None:
        if self._cuda and self._blocks:
            self._blocks[-1].end.busy.synchronize()

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._cuda else end - start)


def cuda_event() -> Any:
    """What the device has got to on its current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
