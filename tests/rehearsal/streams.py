"""Streams that run as late as they may.

Work of the main stream runs at once, so that it would hide who does not wait for it: clocks tell (`clocks`). Work of a
side stream is kept and runs when something waits for it: an event that was recorded behind it, `wait_stream`,
`synchronize`. Until then what it writes reads as before, or as noise where it is new; what it reads is read when it
runs, so whoever writes there meanwhile is seen. Of the main stream the host knows what it has waited for: an event
behind that has not passed yet, and page-locked memory that a copy writes to is noise until then. Memory that nobody
holds any more when kept work runs, and that no `record_stream` keeps for its stream, is overwritten first: the main
stream may have had it. Who writes to page-locked memory before the host waited for a copy from there is refused.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from . import clocks, nccl
from .ledger import note, refuse
from .storages import device, key, on_device

NOISE = 5.5e4  # also of float16
_local = threading.local()
_arrives = threading.RLock()
_aliases: Counter[int | None] = Counter()
"""Tensors by which kept work itself holds a storage."""
_reading: list[tuple[Tensor, Tensor]] = []
"""(Page-locked memory, what it held) of copies to the device that the host has not waited for."""
_arriving: deque[tuple[int, Tensor, Tensor]] = deque()
"""(Time of the main stream, page-locked memory, what comes there) of its copies that the host has not waited for."""


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

    def kept(self) -> list[Callable[[], None]]:
        return [work.run for work in self._work]

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
        clocks.join(self.stream_id, event.clock)
        if self is Stream.main or event.stream is self:
            event.pass_()
        elif event.stream is not None and event.stream is not Stream.main:
            self.keep(Work(event.pass_, ()))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("Stream.synchronize", self)
        self.run_to(self.asked)

    def query(self) -> bool:
        if not self._work:
            host_knows(clocks.clock_of(self.stream_id))
        return not self._work

    def __enter__(self) -> Stream:
        _stack().append(self)
        _note_move()
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()
        _note_move()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Event:
    """A moment of a stream: what was asked of it until then."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self._number, self._time, self._polls = 0, 0.0, 0
        self.clock: clocks.Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current()
        self._number, self._time = self.stream.asked, time.perf_counter()
        self.clock = clocks.clock_of(self.stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def pass_(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self._number)

    def query(self) -> bool:
        """Whether it has passed: not yet where it is asked first, as who polls must be able to bear."""
        if self._is_known():
            return True
        self._polls += 1
        if self._polls > 1:
            self.pass_()
            host_knows(self.clock)
        return self._polls > 1

    def synchronize(self) -> None:
        """Nobody waits for what is known to have passed."""
        if not self._is_known():
            host_waits("Event.synchronize", clock=self.clock)
        self.pass_()

    def _is_known(self) -> bool:
        """Whether the host has waited for it, or for what comes behind it."""
        done = self.stream is None or self.stream is Stream.main or self.stream.done >= self._number
        return done and clocks.is_behind(clocks.HOST, self.clock)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._time - self._time)


Stream.main = Stream()


def graph_captured() -> Any:
    """The graph (`graphs`) for which this thread's ops are noted, if any."""
    return getattr(_local, "graph", None)


def set_captured(graph: Any) -> None:
    _local.graph = graph


def _stack() -> list[Stream]:
    stack: list[Stream] = _local.__dict__.setdefault("streams", [Stream.main])
    return stack


def current(*_: Any, **__: Any) -> Stream:
    return _stack()[-1]


def set_current(stream: Stream) -> None:
    _stack()[-1] = stream
    _note_move()


def _moves() -> list[tuple[int, Stream]]:
    moves: list[tuple[int, Stream]] = _local.__dict__.setdefault("moves", [(0, Stream.main)])
    return moves


def _note_move() -> None:
    """From the next node of autograd on that this thread makes, the current stream is another one."""
    moves, number, now = _moves(), torch.autograd._get_sequence_nr(), current()
    if moves[-1][0] == number and len(moves) > 1:
        moves.pop()
    if moves[-1][1] is not now:
        moves.append((number, now))


def stream_at(number: int) -> Stream:
    """The stream on which this thread made the node of that number; of gradients of parameters the main one."""
    if number >= 1 << 63:
        return Stream.main
    moves = _moves()
    return moves[bisect_right(moves, number, key=lambda move: move[0]) - 1][1]


def take_gradients(taken: dict[int | None, Stream] | None) -> None:
    """Between two nodes of a backward: gradients by their storage, and who takes them; None: a node runs."""
    _local.taken = taken


def taker_of(tensors: Iterable[Tensor]) -> Stream | None:
    """The stream on which a sum of gradients between two nodes runs."""
    taken = getattr(_local, "taken", None)
    return next((taken[key(t)] for t in tensors if key(t) in taken), None) if taken else None


@contextmanager
def inside(stream: Stream | None) -> Any:
    if stream is None:
        yield
    else:
        with stream:
            yield stream


@contextmanager
def carried_out() -> Any:
    """Ops in here run, whatever the stream; whoever asked for them has been told of it."""
    before, _local.carried = is_carried(), True
    try:
        with Stream.main:
            yield
    finally:
        _local.carried = before


def is_carried() -> bool:
    return getattr(_local, "carried", False)


def asks(stream: Stream, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
    """The host asks a stream for an op."""
    if is_carried():
        return
    graph = graph_captured()
    if graph is None:
        clocks.asked(stream.stream_id)
        clocks.touch(stream.stream_id, reads, writes, what)
    elif stream is graph.stream:
        graph.touches.append(([*reads], [*writes], what))
    else:
        raise refuse(f"{what} on another stream while a graph is captured")


def host_waits(how: str, stream: Stream | None = None, clock: clocks.Clock | None = None) -> None:
    """The host waits for a stream, the current one as a rule, or for an event's clock: copies to it are done."""
    if graph_captured() is not None:
        raise refuse(f"{how} while a graph is captured")
    note("waits", how)
    clock = clocks.clock_of((stream or current()).stream_id) if clock is None else clock
    clocks.join(clocks.HOST, clock)
    nccl.host_waited(clock)
    _settle()
    host_knows(clock)


def host_knows(clock: clocks.Clock) -> None:
    """What the clock knows has come to its end: copies of the main stream until then have arrived."""
    clocks.join(clocks.HOST, clock)
    _arrive(clocks.clock_of(clocks.HOST).get(Stream.main.stream_id, 0))


def _arrive(time_of_main: int) -> None:
    with _arrives, carried_out():
        while _arriving and _arriving[0][0] <= time_of_main:
            _, target, came = _arriving.popleft()
            target.copy_(came)


def to_pinned(target: Tensor, source: Tensor) -> None:
    """A copy of the main stream to page-locked memory begins, which the host may not read yet."""
    now = clocks.clock_of(Stream.main.stream_id)[Stream.main.stream_id]
    with _arrives:
        _arriving.append((now, target.detach(), source.detach().clone()))
        target.detach().fill_(NOISE if target.is_floating_point() else 77)


def arrive_at(pinned: Tensor) -> None:
    """The device itself reads or writes there behind such copies."""
    mine = [now for now, target, _ in list(_arriving) if key(target) == key(pinned)]
    if mine:
        _arrive(mine[-1])


def _settle() -> None:
    while _reading:
        pinned, held = _reading.pop()
        if not torch.equal(pinned.view(-1).view(torch.uint8), held.view(-1).view(torch.uint8)):
            raise refuse("page-locked memory was written to while a copy to the device read it")


def host_touches(reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
    """The host itself reads or writes memory; only such as a stream copies from or to has a history."""
    reads, writes = ([x for x in some if clocks.is_touched(x)] for some in (reads, writes))
    if (reads or writes) and not is_carried():
        clocks.asked(clocks.HOST)
        clocks.touch(clocks.HOST, reads, writes, what)


def recorded(x: Tensor, stream: Stream) -> None:
    address = key(x)
    if address is not None:
        clocks.kept_for[address].add(stream.stream_id)


def _overwrite_if_freed(x: Tensor, stream: Stream) -> None:
    address = key(x)
    if address is None or not on_device(x) or stream.stream_id in clocks.kept_for[address]:
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
