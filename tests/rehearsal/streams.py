"""Streams that run as late as they may.

Work of the main stream runs at once: what the host asks for, it asks for in order. Work of a side stream is kept and
runs when something waits for it: an event that was recorded behind it, `wait_stream`, `synchronize`. Until then what it
writes reads as before, or as noise where it is new; what it reads is read when it runs, so whoever writes there
meanwhile is seen. Memory that nobody holds any more when kept work runs, and that no `record_stream` keeps for its
stream, is overwritten first: the main stream may have had it. Who writes to page-locked memory before the host waited
for a copy from there is refused.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from .ledger import note, refuse
from .storages import device, key, on_device

NOISE = 7.7e7
_local = threading.local()
_kept_for: set[tuple[int, int]] = set()
"""(Storage, stream) that `record_stream` has named."""
_aliases: Counter[int | None] = Counter()
"""Tensors by which kept work itself holds a storage."""
_reading: list[tuple[Tensor, Tensor]] = []
"""(Page-locked memory, what it held) of copies to the device that the host has not waited for."""


EVERY: weakref.WeakSet[Stream] = weakref.WeakSet()


class Work(NamedTuple):
    """One op of a side stream that has not run."""

    run: Callable[[], None]
    tensors: tuple[Tensor, ...]
    """What it reads and writes."""


class Stream:
    """A queue of work. Stream 0 is the main one and runs at once."""

    _numbers = 0
    main: Stream

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = Stream._numbers
        Stream._numbers += 1
        self._work: deque[Work] = deque()
        self._lock = threading.RLock()
        self.asked = self.done = 0
        EVERY.add(self)

    @property
    def device(self) -> torch.device:
        return device()

    @property
    def device_index(self) -> int:
        return int(device().index or 0)

    def keep(self, work: Work) -> None:
        with self._lock:
            self._work.append(work)
            self.asked += 1

    def run_to(self, number: int) -> None:
        """Run what was asked for until then, in order."""
        with self._lock, carried_out():
            while self.done < number and self._work:
                work = self._work.popleft()
                self.done += 1
                for tensor in work.tensors:
                    _overwrite_if_freed(tensor, self)
                work.run()
                _aliases.subtract(key(t) for t in work.tensors)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if self is Stream.main or event.stream is self:
            event.pass_()
        elif event.stream is not None and event.stream is not Stream.main:
            self.keep(Work(event.pass_, ()))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("Stream.synchronize")
        self.run_to(self.asked)

    def query(self) -> bool:
        return not self._work

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Event:
    """A moment of a stream: what was asked of it until then."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self._number, self._time, self._polls = 0, 0.0, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current()
        self._number, self._time = self.stream.asked, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def pass_(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self._number)

    def query(self) -> bool:
        """Whether it has passed: not yet where it is asked first, as who polls must be able to bear."""
        if self.stream is None or self.stream is Stream.main or self.stream.done >= self._number:
            return True
        self._polls += 1
        if self._polls > 1:
            self.pass_()
        return self._polls > 1

    def synchronize(self) -> None:
        host_waits("Event.synchronize")
        self.pass_()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._time - self._time)


Stream.main = Stream()


class Graph:
    """What ran inside `capture`, to be run again on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.stream = Stream()
        EVERY.discard(self.stream)

    def replay(self) -> None:
        with carried_out():
            for work in self.stream._work:
                work.run()


@contextmanager
def capture(graph: Graph, *_: Any, **__: Any) -> Any:
    """Ops inside are kept and do not run; whoever waits for the device inside is refused."""
    _local.capturing = True
    try:
        with graph.stream:
            yield
    finally:
        _local.capturing = False


def is_capturing() -> bool:
    return getattr(_local, "capturing", False)


def _stack() -> list[Stream]:
    stack: list[Stream] = _local.__dict__.setdefault("streams", [Stream.main])
    return stack


def current(*_: Any, **__: Any) -> Stream:
    return _stack()[-1]


def set_current(stream: Stream) -> None:
    _stack()[-1] = stream


@contextmanager
def inside(stream: Stream | None) -> Any:
    if stream is None:
        yield
    else:
        with stream:
            yield stream


@contextmanager
def carried_out() -> Any:
    """Ops in here run, whatever the stream."""
    with Stream.main:
        yield


def host_waits(how: str) -> None:
    """The host waits for the device: copies to it are done."""
    if is_capturing():
        raise refuse(f"{how} while a graph is captured")
    note("waits", how)
    _settle()


def _settle() -> None:
    while _reading:
        pinned, held = _reading.pop()
        if not torch.equal(pinned.view(-1).view(torch.uint8), held.view(-1).view(torch.uint8)):
            raise refuse("page-locked memory was written to while a copy to the device read it")


def host_reads(x: Tensor) -> None:
    """The host reads its own memory: nothing to do, what has not come yet is still noise."""


def recorded(x: Tensor, stream: Stream) -> None:
    address = key(x)
    if address is not None:
        _kept_for.add((address, stream.stream_id))


def _overwrite_if_freed(x: Tensor, stream: Stream) -> None:
    address = key(x)
    if address is None or not on_device(x) or (address, stream.stream_id) in _kept_for:
        return
    storage = x.untyped_storage()  # holds it once more
    if torch._C._storage_Use_Count(storage._cdata) - 1 <= _aliases[address] and x.is_floating_point():
        x.fill_(NOISE)


SHAPES = {"set_", "resize_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_"}
"""What changes a tensor and no memory, so the host does it at once."""


def keep(func: Any, args: Any, kwargs: Any, stream: Stream) -> Any:
    """An op on a side stream: its result as noise, the op itself kept."""
    if is_view(func) or func._schema.name.partition("::")[2] in SHAPES:
        return func(*args, **kwargs)
    # By other tensors of the same storages, so that it can be told whether anybody else holds these.
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    held = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    if func._schema.is_mutable:
        stream.keep(Work(lambda: func(*args, **kwargs), _counted(held)))
        return MUTATED
    out = func(*args, **kwargs)
    known = {key(t) for t in held}
    fresh = [(i, t.detach()) for i, t in enumerate(_tensors(out)) if key(t) not in known]
    for _, tensor in fresh:
        recorded(tensor, stream)  # made on this stream, so it is used again after it
        if tensor.is_floating_point():
            tensor.fill_(NOISE)

    if "empty" in func._schema.name:
        return out

    def run() -> None:
        again = _tensors(func(*args, **kwargs))
        for place, tensor in fresh:
            tensor.copy_(again[place])

    stream.keep(Work(run, _counted([*held, *(t for _, t in fresh)])))
    return out


MUTATED = object()
"""The op gives back what it writes to: its own arguments, that is."""


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, Tensor)]


def _counted(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    _aliases.update(key(t) for t in tensors)
    return tuple(tensors)


def is_view(func: Any) -> bool:
    """Whether the op gives other views of the same memory and computes nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def from_pinned(source: Tensor) -> None:
    """A copy to the device begins whose source the host may not write to."""
    _reading.append((source.detach(), source.detach().clone()))
    if len(_reading) > 256:
        del _reading[:128]
