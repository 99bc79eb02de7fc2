"""How the ranks of a job are divided among its replicas: so many each, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import EvenloadError


class PlaceInJob(NamedTuple):
    """Where a process stands in a job of replicas."""

    replica: int
    rank: int
    """In the replica's world."""
    size: int
    """Of that world."""


def place_in(sizes: Sequence[int], rank: int) -> PlaceInJob:
    """The place of a rank of the job, whose replicas have so many ranks each."""
    ends = list(accumulate(sizes))
    replica = next(number for number, end in enumerate(ends) if rank < end)
    return PlaceInJob(replica, rank - (ends[replica] - sizes[replica]), sizes[replica])


def named_rank(sizes: Sequence[int], rank: int) -> str:
    """A rank of the job as messages name it, with its replica where there are several."""
    return f"{rank} (replica {place_in(sizes, rank).replica})" if len(sizes) > 1 and rank >= 0 else str(rank)


def refuse_other_size(sizes: Sequence[int], size: int) -> None:
    """Raise EvenloadError where a job of so many processes is not filled by its replicas."""
    if sum(sizes) != size:
        what, detail = "the replicas do not fill the job", f"{size} processes, parallel.replicas of {list(sizes)} ranks"
        raise EvenloadError(what, detail, f"start {sum(sizes)} processes, or change parallel.replicas")
