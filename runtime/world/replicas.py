"""Replicas of one job, each a torch world of its own, and the group across them.

The default process group of a process is its replica's, so a trainer, its planes, stage links and checkpoints know
nothing of other replicas, which may be of another shape or on other machines. What concerns the job as a whole goes
over one more group, made by hand over the job's store: ``everyone(value, "job")`` and the like (`agreement`).

Where replicas come and go (`roster`), a call that a lost replica breaks raises `ReplicasChangedError` on all ranks of
each one that stays, and a step is settled by its `commit`: whoever comes to it has all sums of the step.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ...core.machine.replicas import named_rank, place_in
from .variables import MEETING_PLACE

Value = TypeVar("Value")


_LOOK_S = 0.05
_BEAT_S = 1.0


class ReplicasChangedError(Exception):
    """Another replica is gone, or one has come: what was going on begins anew with those who are there."""


class Changing(NamedTuple):
    """What a job asks whose replicas come and go."""

    numbers: tuple[int, ...]
    """Those that are there, by their numbers in the job."""
    changed: Callable[[], bool]
    """Whether others are there by now."""
    settled: Callable[[bool], bool]
    """Whether all ranks of this replica say so. Collective over the replica."""
    waits: Callable[[], object]
    """Told every second while this rank waits for other replicas."""
    commit: Callable[[JobGroup, Any], Any]
    """See `commit`."""


class JobGroup:
    """All ranks of a job of replicas, by their ranks in the job. Calls are collective over all of them.

    Tensors go over gloo, through the host's memory. Where replicas come and go, a call comes to its end on all ranks of
    a replica or raises ReplicasChangedError on all of them.
    """

    def __init__(
        self, store: Store, rank: int, sizes: Sequence[int], timeout: timedelta, changing: Changing | None = None
    ) -> None:
        self.store = store
        """Of the whole job."""
        self.rank = rank
        self.size = sum(sizes)
        self.sizes = tuple(sizes)
        self.place = place_in(sizes, rank)
        self.numbers = changing.numbers if changing else tuple(range(len(self.sizes)))
        self.changing = changing
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("across", store), rank, self.size, timeout)

    def together(self, act: Callable[[], Value]) -> Value:
        """What ``act`` gives, whose calls of the group other replicas may break."""
        if self.changing is None:
            return act()
        error: Exception | None = None
        try:
            result = act()
        except (RuntimeError, ReplicasChangedError) as caught:
            error, self._group = caught, None  # whoever waits for this rank hears that it has left
        if not self.changing.settled(error is None):
            self._group = None
            raise ReplicasChangedError(str(error or "another rank of this replica heard it")) from error
        return result

    def wait(self, *works: Any) -> None:
        """Until calls of the group are done."""
        if self.changing is None:
            for work in works:
                work.wait()
            return
        errors: list[RuntimeError] = []

        def wait() -> None:  # a thread of its own: gloo's waits for messages neither poll nor end
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=wait, name="evenload-across", daemon=True)
        thread.start()
        beat_s = time.monotonic()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and self.changing.changed():
                raise ReplicasChangedError("other replicas are there")
            if time.monotonic() - beat_s > _BEAT_S:
                self.changing.waits()
                beat_s = time.monotonic()
        if errors:
            raise errors[0]

    def everyone(self, value: Value) -> list[Value]:
        """The value of every rank."""
        payload = pickle.dumps(value)

        def gathered() -> list[Value]:
            sizes = [int.from_bytes(row, "big") for row in self._rows(len(payload).to_bytes(8, "big"))]
            rows = self._rows(payload.ljust(max(sizes), b"\0"))
            return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

        return self.together(gathered)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, all of the same number of bytes."""
        return self.together(lambda: self._rows(payload))

    def _rows(self, payload: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(self._open.allgather([rows], [own]))
        return [row.numpy().tobytes() for row in rows]

    def swap(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> None:
        """Send a tensor to each rank of ``leaving``, and fill those of ``arriving``, by the ranks that send them, all
        on the host. Both sides call it for a message; others need not, but for all calls in one `together`."""
        works = [self._open.recv([flat], rank, 0) for rank, flat in arriving.items()]
        self.wait(*works, *(self._open.send([flat], rank, 0) for rank, flat in leaving.items()))

    def add_up(self, flat: Tensor) -> None:
        """Sum a tensor over all ranks, in place; each element is summed in one place, so all hold the same bits."""
        on_host = flat.cpu()
        self.together(lambda: self.wait(self._open.allreduce([on_host])))
        flat.copy_(on_host)

    def from_rank(self, source: int, value: Value) -> Value:
        """The value of one rank of the job, on all of them; ``value``: this rank's, which only counts there."""
        payload = pickle.dumps(value) if self.rank == source else b""
        size = torch.tensor([len(payload)])
        self.fill(size, source)
        flat = torch.zeros(int(size), dtype=torch.uint8)
        if payload:
            flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.fill(flat, source)
        received: Value = pickle.loads(flat.numpy().tobytes())
        return received

    def fill(self, tensor: Tensor, source: int) -> None:
        """Make a tensor of the host what it is on one rank of the job."""

        def send() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self.wait(self._open.broadcast([tensor], options))

        self.together(send)

    @property
    def _open(self) -> Any:
        if self._group is None:
            raise ReplicasChangedError("this group was left")
        return self._group


_current: JobGroup | None = None
_leads: bool | None = None


def join(group: JobGroup | None) -> None:
    """Let this process be of a job of replicas from now on; None: of none, and who leads leads on."""
    global _current, _leads
    _current = group
    if group is not None:
        _leads = group.rank == 0


def lead(leads: bool | None) -> None:
    """Say whether this rank speaks and writes for the job; None: it is of no replica, and the first one does."""
    global _leads
    _leads = leads


def leads(rank: int) -> bool:
    """Whether a rank of this replica's world speaks and writes for the whole job."""
    return rank == 0 if _leads is None else _leads


def job_group() -> JobGroup | None:
    """The job of replicas that this process is of; None where the default process group is the whole job."""
    return _current


def is_replica() -> bool:
    """Whether this process is of one of several replicas, met already or not."""
    return _current is not None or MEETING_PLACE in os.environ


def commit(value: Value) -> Value:
    """The value of the job's first rank, once all ranks of all replicas have come here: a step may change what replicas
    hold after it, and does so on all that stay or on none. Collective over the job.

    Raises ReplicasChangedError where a replica is gone and some other has not come: the step is done anew.
    """
    if (job := _current) is None:
        return value
    settled: Value = job.changing.commit(job, value) if job.changing else job.everyone(value)[0]
    return settled


def everyone_left(value: Value, of_replica: Callable[[Value], list[Value]]) -> list[Value]:
    """The value of every rank of the job, by rank; where a replica is lost meanwhile, of this replica's alone, which
    ``of_replica`` gives. For what is told of a step that is settled. Collective over the job."""
    if (job := _current) is not None:
        try:
            return job.everyone(value)
        except ReplicasChangedError:
            join(None)
    return of_replica(value)


def rank_in_job(rank: int) -> int:
    """The rank in the job of one in this replica's world."""
    return sum(_current.sizes[: _current.place.replica]) + rank if _current else rank


def own_rank() -> int:
    """The rank of this process in the job."""
    return rank_in_job(dist.get_rank() if dist.is_initialized() else 0)


def named(rank: int) -> str:
    """A rank of the job as messages name it (`core.machine.replicas.named_rank`)."""
    if _current is None:
        return str(rank)
    return named_rank(_current.sizes, rank, _current.numbers)
