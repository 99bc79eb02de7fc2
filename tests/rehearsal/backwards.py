"""Autograd's streams: each node runs backward on the stream of its forward, behind what comes to it from others.

torch's engine sets streams and waits by the device of a node's tensors, which is the CPU here. So around each backward
the nodes that were made beside the main stream, and those that gradients come to from there, are told theirs: a node
waits for the streams of the gradients that it takes, a sum of gradients runs where they are taken, memory is kept for
who takes it, and in the end whoever asked waits for the leaves. Gradients of parameters are taken on the main stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import streams
from .storages import key
from .streams import Event, Stream


class Engine:
    """torch's, with streams."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        tensors = tuple(tensors)
        with _on_their_streams(tensors):
            return self._engine.run_backward(tensors, *args, **kwargs)


def install() -> None:
    torch.autograd.Variable._execution_engine = Engine(torch.autograd.Variable._execution_engine)  # type: ignore[assignment]


@contextmanager
def _on_their_streams(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    stream_of = {node: streams.stream_at(node._sequence_nr()) for node in _nodes(roots)}
    if all(stream is Stream.main for stream in stream_of.values()) and streams.current() is Stream.main:
        yield
        return
    asker = streams.current()
    pending: defaultdict[Any, list[Event]] = defaultdict(list)
    for root in roots:
        pending[root].append(asker.record_event())
    handles: list[Any] = []
    for node, stream in stream_of.items():
        handles += [
            node.register_prehook(_before(node, stream, pending)),
            node.register_hook(_behind(node, stream, stream_of)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        streams.take_gradients(None)
        streams.set_current(asker)
    asker.wait_stream(Stream.main)


def _nodes(roots: list[Any]) -> list[Any]:
    known, left = {}, list(roots)
    while left:
        node = left.pop()
        if node not in known:
            known[node] = True
            left += [after for after, _ in node.next_functions if after is not None]
    return list(known)


def _before(node: Any, stream: Stream, pending: dict[Any, list[Event]]) -> Any:
    def begin(_: Any) -> None:
        streams.take_gradients(None)
        streams.set_current(stream)
        for event in pending.pop(node, ()):
            if event.stream is not stream:
                stream.wait_event(event)

    return begin


def _behind(node: Any, stream: Stream, stream_of: dict[Any, Stream]) -> Any:
    def end(grads: Any, _: Any) -> None:
        taken: dict[int | None, Stream] = {}
        for (after, _), grad in zip(node.next_functions, grads, strict=False):
            if after is None or not isinstance(grad, Tensor):
                continue
            taker = stream_of[after]
            taken[key(grad)] = taker
            if taker is not stream:
                streams.recorded(grad, taker)
                taker.wait_event(stream.record_event())
        streams.take_gradients(taken)

    return end
