"""Captured graphs: ops that are noted once and asked for again, on the same memory, of whatever stream is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import streams


class Graph:
    """What was asked for inside `capture`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.stream = streams.Stream()
        streams.EVERY.discard(self.stream)  # whose work runs in a replay alone
        self.touches: list[tuple[list[Tensor], list[Tensor], str]] = []
        """Of each op what it reads, what it writes to, and its name."""

    def replay(self) -> None:
        stream = streams.current()
        for reads, writes, what in self.touches:
            streams.asks(stream, reads, writes, what)
        for run in self.stream.kept():
            if stream is streams.Stream.main:
                with streams.carried_out():
                    run()
            else:
                stream.keep(streams.Work(run, ()))


@contextmanager
def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """The device does nothing of what is asked for inside; whoever waits for it there is refused."""
    torch.cuda.synchronize()
    streams.set_captured(graph)
    try:
        with graph.stream:
            yield
    finally:
        streams.set_captured(None)
