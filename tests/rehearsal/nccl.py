"""What NCCL asks of the ranks of a communicator, and whether what they asked for can come to its end.

Each rank notes its units in the order in which it asked for them: a collective, or the sends and receives of one group
call. A unit is on the stream of its communicator, so it comes behind that communicator's last one, and behind all that
the current stream waited for when it was asked. `stuck` plays the units of all ranks with nothing buffered: a unit goes
on when its peers stand at units that take it. gloo buffers and takes messages by their tags; what gloo has brought to
its end can be stuck there.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from .clocks import Clock
from .ledger import refuse, units

RULES: dict[str, str] = {
    "order": "ranks ask a communicator for the same collectives, of the same sizes, in the same order",
    "orders": "ranks that share several communicators ask all of them for their collectives in one order",
    "pairs": "sends meet their receives with nothing buffered: either in one group call, or in an order that fits",
    "one queue": "that also where a device starts all work in the order of asking (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "first call": "all ranks of a communicator take part in its first call, in which the host waits",
    "counts": "what ranks send each other, nothing included, is what each expects",
    "one thread": "one thread of a rank asks for all of it: two have no order",
    "layout": "tensors of collectives are contiguous, and all are of types that NCCL knows",
    "watchers": "threads that watch the job or plan ahead ask nothing of a device, which may be stuck",
    "own device": "a thread that does not say which device has the first one of its machine",
    "abort": "NCCL ends ranks whose peer is gone; the job's message names the one that went first",
}
"""All are checked wherever the rehearsal runs; test_rules.py and test_nccl.py break each of them."""

TYPES = {
    torch.int8, torch.uint8, torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bool,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
"""Those of torch's `ncclDataTypeMap`; complex numbers travel as pairs."""
PREFIX = "nccl "
"""Of the names of communicators, which are actors of `clocks`."""
Unit = dict[str, Any]
"""of: a communicator, or nothing where the host waits; ranks; what: a collective; between: (send or recv, peer,
elements) of a group call; counts: elements (sent, expected) by rank of an all-to-all; after: units of communicators by
their numbers, from 1."""

_threads: list[int] = []
_calls: Counter[str] = Counter()


def check_layout(name: str, tensors: Iterable[torch.Tensor], between_two: bool) -> None:
    for tensor in tensors:
        if tensor.dtype not in TYPES and not tensor.is_complex():
            raise refuse(f"{name} of {tensor.dtype}, which NCCL does not know")
        if not between_two and not tensor.is_contiguous():
            raise refuse(f"{name} of a tensor that is not contiguous, of strides {tensor.stride()}")


def ask(of: str, ranks: Sequence[int], after: Clock, **unit: Any) -> None:
    """Note a unit; see `Unit`. Raises RefusedError for one of a second thread, and where another rank has asked the
    communicator for another collective in this place."""
    if not _threads:
        _threads.append(threading.get_ident())
    if threading.get_ident() not in _threads:
        raise refuse(f"{unit.get('what') or 'a message'} that a second thread asks of {of}")
    units.append({"of": of, "ranks": list(ranks), "after": _after(after), **unit})
    if "what" in unit:
        _compare(of, list(ranks), unit["what"], unit.get("counts") or [])


def host_waited(clock: Clock) -> None:
    """What is asked for from here on comes behind what the clock knows."""
    after = _after(clock)
    if after and not (units and not units[-1]["of"] and units[-1]["after"] == after):
        units.append({"of": "", "after": after})


def _after(clock: Clock) -> dict[str, int]:
    return {str(actor): number for actor, number in clock.items() if str(actor).startswith(PREFIX)}


Call = tuple[str, list[list[int]]]
"""A collective, and what it sends and expects."""


class _Log:
    """The collectives of a rank in a file of the run's folder: whoever comes second to a call notices at once, where
    NCCL would hang. Jobs that share the folder have another parent or port."""

    def __init__(self, folder: str, rank: int) -> None:
        name = f"order.{os.getppid()}.{os.environ.get('MASTER_PORT', '')}.{rank}"
        self._path, self._file, self._rest = Path(folder) / name, -1, b""
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)

    def add(self, of: str, call: Call) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._file, json.dumps([of, *call]).encode() + b"\n")

    def read(self) -> Mapping[str, list[Call]]:
        if self._file < 0 and self._path.exists():
            self._file = os.open(self._path, os.O_RDONLY)
        if self._file >= 0:
            *lines, self._rest = (self._rest + os.read(self._file, 1 << 24)).split(b"\n")
            for of, what, counts in map(json.loads, lines):
                self.calls[of].append((what, counts))
        return self.calls


_logs: dict[int, _Log] = {}


def _compare(of: str, ranks: list[int], what: str, counts: list[list[int]]) -> None:
    folder = os.environ.get("REHEARSAL_OUT")
    if not folder or len(ranks) == 1:
        return
    own, place = int(os.environ["RANK"]), _calls[of]
    _calls[of] += 1
    for rank in ranks:
        _logs.setdefault(rank, _Log(folder, rank))
    _logs[own].add(of, (what, counts))
    for rank in set(ranks) - {own}:
        theirs = _logs[rank].read().get(of, ())
        if len(theirs) <= place:
            continue
        other, their_counts = theirs[place]
        if other != what:
            raise refuse(f"call {place} of {of} is {what} here and {other} on rank {rank}")
        here, there = ranks.index(own), ranks.index(rank)
        for side, opposite in ((0, 1), (1, 0)) if counts else ():
            if counts[side][there] != their_counts[opposite][here]:
                sizes = [row[there] for row in counts], [row[here] for row in their_counts]
                raise refuse(f"call {place} of {of} sends and expects {sizes[0]} here, and {sizes[1]} on rank {rank}")


def broken(ranks: Mapping[int, list[Unit]], one_queue: bool = False) -> list[str]:
    """What ranks have asked for that NCCL may never end, or mix up."""
    return [*unlike(ranks), *_unlike_counts(ranks), *stuck(ranks, one_queue)]


def unlike(ranks: Mapping[int, list[Unit]]) -> list[str]:
    """Where two ranks differ about the collectives of all communicators that both are in."""
    out = []
    for one, other in combinations(sorted(ranks), 2):
        rows = [
            [(u["of"], u["what"]) for u in ranks[rank] if "what" in u and {one, other} <= set(u["ranks"])]
            for rank in (one, other)
        ]
        for place, calls in enumerate(zip(*rows, strict=False)):
            if calls[0] != calls[1]:
                out.append(f"call {place} is {calls[0]} on rank {one} and {calls[1]} on rank {other}")
                break
        else:
            if len(rows[0]) != len(rows[1]):
                out.append(f"rank {one} has {len(rows[0])} calls and rank {other} {len(rows[1])}")
    return out


def _unlike_counts(ranks: Mapping[int, list[Unit]]) -> list[str]:
    """Where ranks send each other other numbers of elements than they expect."""
    sent: defaultdict[Any, list[int]] = defaultdict(list)
    expected: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, row in ranks.items():
        for unit in row:
            for kind, peer, size in unit.get("between", ()):
                into, link = (sent, (rank, peer)) if kind == "send" else (expected, (peer, rank))
                into[unit["of"], link].append(size)
            for side, sizes in zip((sent, expected), unit.get("counts") or (), strict=False):
                for peer, size in zip(unit["ranks"], sizes, strict=True):
                    side[unit["of"], "all", (rank, peer) if side is sent else (peer, rank)].append(size)
    return [
        f"rank {link[0]} sends rank {link[1]} {sent[*of, link]} by {of}, which expects {expected[*of, link]}"
        for *of, link in {**sent, **expected}
        if set(link) <= set(ranks) and sent[*of, link] != expected[*of, link]
    ]


class _Played:
    """A rank in `stuck`."""

    def __init__(self, row: list[Unit]) -> None:
        self.row = row
        self.queues: defaultdict[str, deque[int]] = defaultdict(deque)
        """Indices of the units of each communicator that have not ended."""
        self.host: deque[tuple[int, str]] = deque()
        """Where the host waits: an index, and the communicator that begins there."""
        self.started: set[int] = set()
        self.ended: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        """Those that have started, by communicator."""
        self.posted: Counter[tuple[str, str, int]] = Counter()
        """Messages of units that have started."""
        self.begun: set[str] = set()
        self.next = 0
        for index, unit in enumerate(row):
            if not unit["of"]:
                self.host.append((index, ""))
                continue
            if unit["of"] not in self.queues:
                self.host.append((index, unit["of"]))
            self.queues[unit["of"]].append(index)

    def passed(self, unit: Unit) -> bool:
        return all(self.ended[of] >= number for of, number in unit["after"].items())

    def heads(self) -> list[int]:
        """Units that the host has asked for and that are first on their communicator."""
        limit = self.host[0][0] if self.host else len(self.row)
        return sorted(queue[0] for queue in self.queues.values() if queue and queue[0] < limit)

    def start(self, index: int) -> None:
        unit = self.row[index]
        self.started.add(index)
        self.collectives[unit["of"]] += "what" in unit
        for kind, peer, _ in unit.get("between", ()):
            self.posted[unit["of"], kind, peer] += 1

    def is_next(self, index: int) -> bool:
        """Whether all units before it have started."""
        while self.next in self.started or not self.row[self.next]["of"]:
            self.next += 1
        return index == self.next

    def end(self, index: int) -> None:
        of = self.row[index]["of"]
        self.queues[of].popleft()
        self.ended[of] += 1


def stuck(ranks: Mapping[int, list[Unit]], one_queue: bool = False) -> list[str]:
    """What ranks would wait in for ever; nothing where all come to their end. ``one_queue``: a unit starts only when
    all that its rank has asked for before have."""
    played = {rank: _Played(row) for rank, row in ranks.items()}
    moved = True
    while moved:
        moved = False
        for rank, one in played.items():
            while one.host and _host_goes_on(one, played):
                one.host.popleft()
                moved = True
            for index in one.heads():
                unit = one.row[index]
                if index not in one.started:
                    if not one.passed(unit) or (one_queue and not one.is_next(index)):
                        continue
                    one.start(index)
                    moved = True
                if _ends(rank, unit, played):
                    one.end(index)
                    moved = True
    out = []
    for rank, one in played.items():
        waits = [one.row[queue[0]] for queue in one.queues.values() if queue]
        if waits:
            first = min(waits, key=one.row.index)
            out.append(f"rank {rank} never ends {first.get('what') or first['between']} of {first['of']}")
    return out


def _host_goes_on(one: _Played, played: Mapping[int, _Played]) -> bool:
    index, begins = one.host[0]
    if not begins:
        return one.passed(one.row[index])
    one.begun.add(begins)
    members = [played[rank] for rank in one.row[index]["ranks"] if rank in played]
    return all(begins in member.begun for member in members)


def _ends(rank: int, unit: Unit, played: Mapping[int, _Played]) -> bool:
    """Whether its peers have started what takes it."""
    of, own = unit["of"], played[rank]
    if "what" in unit:
        return all(played[peer].collectives[of] >= own.collectives[of] for peer in unit["ranks"] if peer in played)
    opposite = {"send": "recv", "recv": "send"}
    return all(
        played[peer].posted[of, opposite[kind], rank] >= own.posted[of, kind, peer]
        for kind, peer, _ in unit["between"]
        if peer in played
    )
