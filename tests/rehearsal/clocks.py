"""What happens before what: a clock for each stream, communicator and the host, and who touched which bytes when.

The clock of a stream says how far it has come, and of each other one how much of it comes before. Waiting for an event
joins the clock that was recorded; a host that waits for the device joins the stream's, and all that it asks for later
comes behind it. Bytes that two of them touch, one of them writing, must have an order: otherwise the device may do it
in either, however early or late the rehearsal itself has done it. So a wait that is missing is noticed on both sides,
before a stream beside begins and before the main one goes on.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .ledger import refuse
from .storages import forgets, is_gone, key

Actor = int | str
"""A stream by its number, a communicator by its name, the host."""
Clock = dict[Actor, int]
HOST = "the host"

_clocks: dict[Actor, Clock] = {HOST: {}}
_host_has: dict[Actor, int] = {}
"""Of each actor, what the host had waited for when it last asked it for something."""
_host_moves = 0
_lock = threading.RLock()
before_asked: list[Callable[[], None]] = []
"""What has a word in who may ask anything of the device; it may raise."""


class Touched(NamedTuple):
    """Who last wrote to a piece of memory, and who has read it since, each by its own clock."""

    written: Clock
    read: Clock


_touched: dict[int, dict[tuple[int, int], Touched]] = {}
"""By storage and bytes."""
_owners: dict[int, int] = {}
"""The streams beside the main one on which storages were made, and on which their memory is used again."""
_lent: dict[int, set[int]] = {}
"""By such a stream, its storages that another one has touched."""
kept_for: defaultdict[int, set[Actor]] = defaultdict(set)
"""By storage, the streams that `record_stream` has named."""


@forgets.append
def _forget(address: int) -> None:
    _touched.pop(address, None)
    _owners.pop(address, None)
    kept_for.pop(address, None)


def clock_of(actor: Actor) -> Clock:
    """A copy of its clock as it is."""
    with _lock:
        return dict(_clocks.get(actor, ()))


def join(actor: Actor, clock: Clock) -> None:
    """What the actor does from here on comes behind all that the clock knows."""
    global _host_moves
    with _lock:
        own = _clocks.setdefault(actor, {})
        for other, number in clock.items():
            if number > own.get(other, 0):
                own[other] = number
        _host_moves += actor is HOST


def is_behind(actor: Actor, clock: Clock) -> bool:
    """Whether what the actor does comes behind all that the clock knows."""
    with _lock:
        own = _clocks.get(actor, {})
        return all(number <= own.get(other, 0) for other, number in clock.items())


def host_waits_for_all() -> None:
    """The host waits for the device."""
    with _lock:
        for clock in list(_clocks.values()):
            join(HOST, clock)


def asked(actor: Actor) -> int:
    """The host asks an actor for its next work, which comes behind what the host has waited for; its number."""
    global _host_moves
    with _lock:
        if actor is HOST:
            _host_moves += 1
        else:
            for check in before_asked:
                check()
        if actor is not HOST and _host_has.get(actor) != _host_moves:
            join(actor, _clocks[HOST])
            _host_has[actor] = _host_moves
        own = _clocks.setdefault(actor, {})
        own[actor] = own.get(actor, 0) + 1
        return own[actor]


def touch(actor: Actor, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
    """The actor's latest work touches these. Raises RefusedError where another's touch of the same bytes has no order
    with it."""
    with _lock, torch._C.DisableTorchFunction():
        own = _clocks[actor]
        number = own.get(actor, 0)
        for tensor in writes:
            if (place := _place(actor, tensor)) is None:
                continue
            pieces, span = place
            for piece in [piece for piece in pieces if piece[0] < span[1] and span[0] < piece[1]]:
                _compare(actor, own, pieces[piece].written, f"{what} writes to", "written")
                _compare(actor, own, pieces[piece].read, f"{what} writes to", "read")
                if span[0] <= piece[0] and piece[1] <= span[1]:
                    del pieces[piece]
            pieces[span] = Touched({actor: number}, {})
        for tensor in reads:
            if (place := _place(actor, tensor)) is None:
                continue
            pieces, span = place
            for piece, touched in pieces.items():
                if piece[0] < span[1] and span[0] < piece[1]:
                    _compare(actor, own, touched.written, f"{what} reads", "written")
            pieces.setdefault(span, Touched({}, {})).read[actor] = number


def made(stream: int, tensors: Iterable[Tensor]) -> None:
    """A stream's work has new memory, which may be what was freed before. Raises RefusedError where another stream may
    still use that, and no `record_stream` has kept it."""
    with _lock:
        if stream:
            _owners.update({address: stream for t in tensors if (address := key(t)) is not None})
        own = _clocks.get(stream, {})
        for address in [address for address in _lent.get(stream, ()) if is_gone(address)]:
            _lent[stream].discard(address)
            for touched in _touched.get(address, {}).values():
                for other, number in {**touched.read, **touched.written}.items():
                    if other == stream or isinstance(other, str) or other in kept_for[address]:
                        continue
                    if own.get(other, 0) < number:
                        raise refuse(f"memory of {name(stream)} that was freed and that {name(other)} may still use")


def is_touched(tensor: Tensor) -> bool:
    return key(tensor) in _touched


def _compare(actor: Actor, own: Clock, others: Clock, what: str, how: str) -> None:
    for other, number in others.items():
        if other != actor and own.get(other, 0) < number:
            raise refuse(f"{what} on {name(actor)} what is {how} on {name(other)}, and neither waits for the other")


def name(actor: Actor) -> str:
    if isinstance(actor, str):
        return actor
    return f"stream {actor}" if actor else "the main stream"


def _place(actor: Actor, tensor: Tensor) -> tuple[dict[tuple[int, int], Touched], tuple[int, int]] | None:
    """What is known of its storage, and the bytes from its first to its last element."""
    address = key(tensor)
    if address is None or not tensor.numel():
        return None
    if address in _owners and _owners[address] != actor:
        _lent.setdefault(_owners[address], set()).add(address)
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) * size
    return _touched.setdefault(address, {}), (first, last + size)
