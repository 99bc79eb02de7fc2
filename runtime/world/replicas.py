"""Replicas of one job, each a torch world of its own, and the group across them.

The default process group of a process is its replica's, so a trainer, its planes, stage links and checkpoints know
nothing of other replicas, which may be of another shape or on other machines. What concerns the job as a whole goes
over one more group, made by hand over the job's store: ``everyone(value, "job")`` and the like (`agreement`).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ...core.machine.replicas import named_rank, place_in

Value = TypeVar("Value")


class JobGroup:
    """All ranks of a job of replicas, by their ranks in the job. Calls are collective over all of them.

    Tensors go over gloo, through the host's memory: replicas exchange what is small.
    """

    def __init__(self, store: Store, rank: int, sizes: Sequence[int], timeout: timedelta) -> None:
        self.store = store
        """Of the whole job."""
        self.rank = rank
        self.size = sum(sizes)
        self.sizes = tuple(sizes)
        self.place = place_in(sizes, rank)
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("across", store), rank, self.size, timeout)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, all of the same number of bytes."""
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([rows], [own]).wait()
        return [row.numpy().tobytes() for row in rows]

    def everyone(self, value: Value) -> list[Value]:
        """The value of every rank."""
        payload = pickle.dumps(value)
        sizes = [int.from_bytes(row, "big") for row in self.gather_bytes(len(payload).to_bytes(8, "big"))]
        return [pickle.loads(row[:size]) for row, size in zip(self._padded(payload, sizes), sizes, strict=True)]

    def _padded(self, payload: bytes, sizes: Sequence[int]) -> list[bytes]:
        return self.gather_bytes(payload.ljust(max(sizes), b"\0"))

    def add_up(self, flat: Tensor) -> None:
        """Sum a tensor over all ranks, in place; each element is summed in one place, so all hold the same bits."""
        on_host = flat.cpu()
        self._group.allreduce([on_host]).wait()
        flat.copy_(on_host)


_current: JobGroup | None = None


def join(group: JobGroup | None) -> None:
    """Let this process be of a job of replicas from now on; None: of none."""
    global _current
    _current = group


def job_group() -> JobGroup | None:
    """The job of replicas that this process is of; None where the default process group is the whole job."""
    return _current


def rank_in_job(rank: int) -> int:
    """The rank in the job of one in this replica's world."""
    return sum(_current.sizes[: _current.place.replica]) + rank if _current else rank


def own_rank() -> int:
    """The rank of this process in the job."""
    return rank_in_job(dist.get_rank() if dist.is_initialized() else 0)


def named(rank: int) -> str:
    """A rank of the job as messages name it (`core.machine.replicas.named_rank`)."""
    return named_rank(_current.sizes if _current else (), rank)
