"""How the ranks of a job are divided among its replicas: so many each, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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


def named_rank(sizes: Sequence[int], rank: int, numbers: Sequence[int] = ()) -> str:
    """A rank of the job as messages name it, with its replica where there are several; ``numbers``: of the replicas,
    where they are not counted from 0."""
    if len(sizes) < 2 or rank < 0:
        return str(rank)
    replica = place_in(sizes, rank).replica
    return f"{rank} (replica {numbers[replica] if numbers else replica})"


class RosterMember(NamedTuple):
    """A replica that takes part in a job whose replicas come and go."""

    number: int
    """In the recipe's ``parallel.replicas``."""
    life: int
    """How often a replica of this number has been started: what is lost does not come back under its name."""
    ranks: int
    shape: dict[str, Any]
    """Of `core.recipe.sections.Replica`, ready for JSON."""


class Roster(NamedTuple):
    """Who takes part from now on."""

    number: int
    """Rosters are counted from 1."""
    members: tuple[RosterMember, ...]
    """By their numbers."""

    def encode(self) -> str:
        return json.dumps([self.number, self.members])

    @classmethod
    def decode(cls, text: bytes | str) -> Roster:
        number, members = json.loads(text)
        return cls(number, tuple(RosterMember(*one) for one in members))

    def place_of(self, number: int, life: int) -> int | None:
        """The place of a replica among those that take part; None: it does not."""
        return next((place for place, one in enumerate(self.members) if one[:2] == (number, life)), None)


def refuse_other_size(sizes: Sequence[int], size: int) -> None:
    """Raise EvenloadError where a job of so many processes is not filled by its replicas."""
    if sum(sizes) != size:
        what, detail = "the replicas do not fill the job", f"{size} processes, parallel.replicas of {list(sizes)} ranks"
        raise EvenloadError(what, detail, f"start {sum(sizes)} processes, or change parallel.replicas")
